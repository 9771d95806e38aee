"""What each kind of object holds, and how it is looked into without running code of the user's. See `reachable`."""

from __future__ import annotations

import collections
import functools
import io
import logging
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hocket.pystate.executed import is_user_code, origin
from hocket.pystate.layout import foreign_base, origin_of
from hocket.pystate.places import Group, Path, describe, is_number, is_plain, members_of
from hocket.pystate.tokens import ITERATORS, generator_state, iterator_state
from hocket.pystate.walk import MAX_ITEMS, Walk

__all__ = ["HOOK_TABLES", "Visits"]

MAX_ARRAY_BYTES = 1 << 20

HOOK_TABLES = frozenset(
    (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    )
)  # fmt: skip
_MODULE_SLOTS = HOOK_TABLES | {
    "training", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_hocket_version",
}  # fmt: skip
# What a module keeps for saving and loading.
_MODULE_SKIPPED = frozenset(
    (
        "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
)  # fmt: skip
_OPTIMIZER_SLOTS = frozenset(("param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
_OPTIMIZER_SKIPPED = frozenset(("state", "_step_count", "_opt_called", "defaults"))
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_IMMUTABLE: tuple[type, ...] = (
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType, logging.Logger,
    logging.Handler, type(threading.Lock()), type(threading.RLock()), types.FrameType, types.TracebackType,
)  # fmt: skip
# Modules whose C types are values, or hold nothing that a step could read without being watched otherwise.
_TRUSTED_C = ("torch", "numpy", "_thread", "functools", "typing", "operator", "_operator", "re", "_sre", "datetime",
              "decimal", "_decimal", "fractions", "uuid", "_abc", "_weakref", "builtins.method")  # fmt: skip


class Visits(Walk):
    """A method for each kind of object; `_RULES` says which is for which."""

    def visit(self, value: Any, path: Path) -> None:
        rule = _VISITORS.get(type(value))
        if rule is None:
            rule = _VISITORS[type(value)] = _visitor(type(value))
        rule(self, value, path)

    def tensor(self, value: torch.Tensor, path: Path) -> None:
        hooks = [_hooks_of(value, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        meta = (value.dtype, value.device, tuple(value.shape), value.requires_grad, value.layout)
        self.add("tensor", value, path, ("kind", "hooks", "post-accumulate hooks"), (meta, *map(_ids, hooks)), ".")
        for found in hooks:
            for hook in found:
                self.todo.append((hook, (path, "hook of {}", None)))
        if value.__dict__ and not isinstance(value, FakeTensor):  # that has torch's own notes
            self.attributes(value, path)

    def function(self, value: types.FunctionType, path: Path) -> None:
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__]
        self.add("function", value, path, ["__code__", "__defaults__", "__kwdefaults__"], parts, ".")
        if is_user_code(value.__code__):
            self.executed.add(value.__code__, value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if id(cell) in self.done:
                continue
            self.done.add(id(cell))
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            self.add("cell", cell, (path, "closure of {}: {}", name), (name,), (content,))
        if value.__dict__:
            self.attributes(value, path)

    def method(self, value: types.MethodType, path: Path) -> None:
        self.todo.append((value.__self__, (path, ".", "__self__")))
        self.todo.append((value.__func__, path))

    def partial(self, value: functools.partial[Any], path: Path) -> None:
        self.todo += [
            (value.func, (path, ".", "func")), (value.args, (path, ".", "args")),
            (value.keywords, (path, ".", "keywords")),
        ]  # fmt: skip
        if value.__dict__:
            self.attributes(value, path)

    def builtin(self, value: Any, path: Path) -> None:
        owner = value.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.todo.append((owner, (path, ".", "__self__")))

    def descriptor(self, value: Any, path: Path) -> None:
        for part in (getattr(value, "__func__", None), getattr(value, "fget", None), getattr(value, "func", None)):
            if part is not None:
                self.todo.append((part, path))

    def cached(self, value: Any, path: Path) -> None:
        self.todo.append((value.__wrapped__, path))
        if origin(getattr(value.__wrapped__, "__code__", _NO_CODE).co_filename) == "user":
            info = value.cache_info()  # a hit reads what an earlier call with equal arguments has returned
            self.state(value, (path, "the cache of {}", None), (info.misses, info.currsize))

    def module(self, value: nn.Module, path: Path) -> None:
        if type(value).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            self.found.opaque[f"{describe(path)} is a {type(value).__name__}: its communication cannot be captured"] = (
                None
            )
        if _is_ours(value):
            self.names(value.__dict__, path, _MODULE_SLOTS.__contains__)
        else:
            self.attributes(value, path, _MODULE_SLOTS, _MODULE_SKIPPED)
        # A layer of torch's own looks up the entries it was made with; containers go over all they have.
        fixed = origin_of(type(value)) == "torch" and not isinstance(value, _CONTAINERS)
        for name in ("_parameters", "_buffers", "_modules"):
            table = value.__dict__.get(name)
            if type(table) is dict and id(table) not in self.done:
                self.done.add(id(table))
                if fixed and not table:
                    continue
                if name == "_buffers":
                    self.done.update(id(tensor) for tensor in table.values() if _is_constant(tensor))
                # Spelled as the user spells it: model.fc.weight.
                self.add("dict", table, path, list(table), list(table.values()), ".", rebindable=name == "_buffers")

    def optimizer(self, value: torch.optim.Optimizer, path: Path) -> None:
        self.done.add(id(value.state))
        self.done.update(id(value.__dict__.get(key)) for key in _OPTIMIZER_SKIPPED)
        if _is_ours(value):
            self.names(value.__dict__, path, (_OPTIMIZER_SLOTS | {"_hocket_version"}).__contains__)
        else:
            self.names(value.__dict__, path, self.named_or(_OPTIMIZER_SLOTS, _OPTIMIZER_SKIPPED))
        self.class_of(type(value))
        for number, group in enumerate(value.param_groups):
            # Numbers of a group are read anew by every planned step.
            self.done.add(id(group))
            keys = [key for key in group if not _is_numeric(group[key])]
            group_path = (path, f"{{}}.param_groups[{number}]", None)
            counts = frozenset(keys).__contains__
            self.add("dict", group, group_path, keys, [group[key] for key in keys], "[]", counts=counts)

    def imported(self, value: types.ModuleType, path: Path) -> None:
        table = value.__dict__
        if id(table) in self.done:
            return
        whose = origin(getattr(value, "__file__", None) or "<frozen")
        if whose == "torch":
            # By identity only: torch.nn.functional.cross_entropy may be replaced.
            keys = [key for key in self.executed.user_names if key in table]
            self.done.add(id(table))
            values = [table[key] for key in keys]
            counts = self.executed.user_names.__contains__
            group = Group("dict", table, (None, "", value.__name__), keys, values, form=".", counts=counts)
            self.found.groups[id(table), "dict"] = group
            self.todo += [(each, (path, ".", each.__name__)) for each in values if type(each) is types.ModuleType]
        elif whose == "user":
            self.done.add(id(table))
            self.names(table, (None, "", value.__name__), self.named_or(frozenset()))

    def generator(self, value: types.GeneratorType[Any, Any, Any], path: Path) -> None:
        if value.gi_code in self.executed.codes:
            self.found.opaque[f"{describe(path)} is a generator that the step advances"] = None

    def generator_of_numbers(self, value: Any, path: Path) -> None:
        self.state(value, path, generator_state(value))

    def array(self, value: np.ndarray[Any, Any], path: Path) -> None:
        if value.nbytes > MAX_ARRAY_BYTES:
            size = value.nbytes >> 20
            self.found.opaque[f"{describe(path)} is an array of {size} MiB, too large to watch; make it a tensor"] = (
                None
            )
        elif value.dtype == object:
            self.todo += [(each, (path, "[]", n)) for n, each in enumerate(value.flat)]
            self.add("sequence", value, path, range(value.size), list(value.flat), "[]")
        else:
            self.add("buffer", value, path, ("",), (value.tobytes(),))

    def buffer(self, value: Any, path: Path) -> None:
        if len(value) > MAX_ARRAY_BYTES:
            self.found.opaque[f"{describe(path)} has {len(value) >> 20} MiB, too large to watch"] = None
        else:
            self.add("buffer", value, path, ("",), (bytes(value),))

    def iterator(self, value: Any, path: Path) -> None:
        try:
            self.state(value, path, iterator_state(value))
        except (TypeError, ValueError):
            self.found.opaque[f"{describe(path)} is a {type(value).__name__}, whose place cannot be read"] = None

    def stream(self, value: io.IOBase, path: Path) -> None:
        try:
            self.state(value, path, value.tell())
        except (OSError, ValueError):
            self.state(value, path, None)  # not seekable: a step that uses it is refused when it does

    def weak(self, value: Any, path: Path) -> None:
        target = value()
        if target is not None:
            self.weakly.append((target, path))

    def context(self, value: ContextVar[Any], path: Path) -> None:
        content = value.get(None)
        self.add("sequence", value, path, (value.name,), (content,))

    def mapping(self, value: dict[Any, Any], path: Path) -> None:
        self.table(value, path)
        if type(value) not in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            self.attributes(value, path)

    def proxy(self, value: types.MappingProxyType[Any, Any], path: Path) -> None:
        self.add("sequence", value, path, list(value), list(value.values()), "[]")

    def sequence(self, value: Any, path: Path) -> None:
        kind = "list" if isinstance(value, list) else "sequence"
        base = next(each for each in (list, tuple, collections.deque) if isinstance(value, each))
        if base.__len__(value) > MAX_ITEMS:
            self.found.opaque[f"{describe(path)} has {base.__len__(value)} items, too many to watch"] = None
            return
        items = list(base.__iter__(value))
        self.add(kind, value, path, range(len(items)), items, "[]")
        if type(value) not in (list, tuple, collections.deque):
            self.attributes(value, path)

    def members(self, value: Any, path: Path) -> None:
        if len(value) > MAX_ITEMS:
            self.found.opaque[f"{describe(path)} has {len(value)} members, too many to watch"] = None
            return
        self.found.groups[id(value), "set"] = Group("set", value, path, ("",), (members_of(value),))
        self.found.num_values += len(value)
        self.todo += [(each, (path, "member of {}", None)) for each in value if not is_plain(each)]

    def nothing(self, value: Any, path: Path) -> None:
        """Immutable, or trusted."""

    def instance(self, value: Any, path: Path) -> None:
        if not _is_ours(value):
            self.attributes(value, path)

    def opaque(self, value: Any, path: Path) -> None:
        kind = type(value)
        self.found.opaque[f"{describe(path)} is a {kind.__module__}.{kind.__name__}, whose state cannot be seen"] = None


_NO_CODE = (lambda: None).__code__

_RULES: tuple[tuple[Any, Callable[[Visits, Any, Path], None]], ...] = (
    (torch.Tensor, Visits.tensor),
    (types.FunctionType, Visits.function),
    (types.MethodType, Visits.method),
    (functools.partial, Visits.partial),
    ((types.BuiltinFunctionType, types.MethodWrapperType), Visits.builtin),
    ((staticmethod, classmethod, property, functools.cached_property), Visits.descriptor),
    (functools._lru_cache_wrapper, Visits.cached),
    (torch.utils.data.DataLoader, Visits.nothing),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), Visits.nothing),
    (nn.Module, Visits.module),
    (torch.optim.Optimizer, Visits.optimizer),
    (type, Visits.klass),
    (types.ModuleType, Visits.imported),
    (types.GeneratorType, Visits.generator),
    (torch.Generator, Visits.generator_of_numbers),
    (random.Random, Visits.generator_of_numbers),
    (np.random.Generator, Visits.generator_of_numbers),
    (np.random.RandomState, Visits.generator_of_numbers),
    (np.ndarray, Visits.array),
    ((bytearray, memoryview), Visits.buffer),
    (ITERATORS, Visits.iterator),
    (io.IOBase, Visits.stream),
    (weakref.ref, Visits.weak),
    (ContextVar, Visits.context),
    (_IMMUTABLE, Visits.nothing),
    (dict, Visits.mapping),
    (types.MappingProxyType, Visits.proxy),
    ((list, tuple, collections.deque), Visits.sequence),
    ((set, frozenset), Visits.members),
)
_VISITORS: dict[type, Callable[[Visits, Any, Path], None]] = {}


def _visitor(kind: type) -> Callable[[Visits, Any, Path], None]:
    for kinds, visit in _RULES:
        if issubclass(kind, kinds):
            return visit
    holder = foreign_base(kind)
    if holder is not None:
        trusted = (holder.__module__ or "").startswith(_TRUSTED_C) or issubclass(kind, BaseException)
        return Visits.instance if trusted else Visits.opaque
    return Visits.instance


def _is_ours(value: Any) -> bool:
    """A fused model or its optimizer: what it remembers is no part of what it computes; its version tells the rest."""
    return type(value).__module__.startswith("hocket.") and origin_of(type(value)) == "torch"


def _is_constant(tensor: Any) -> bool:
    """Whether a buffer is out of reach of autograd, and so of hooks."""
    return isinstance(tensor, torch.Tensor) and not tensor.requires_grad


def _hooks_of(tensor: torch.Tensor, name: str) -> list[Any]:
    found = getattr(tensor, name, None)
    return list(found.values()) if found else []


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _is_numeric(value: Any) -> bool:
    """Numbers that a captured step reads anew, alone or in a pair: a rate, betas."""
    if isinstance(value, torch.Tensor):
        return True
    return is_number(value) or (type(value) in (tuple, list) and all(map(_is_numeric, value)))
