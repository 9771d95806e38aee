"""Rules for each kind of object: the state that it holds besides attributes, read without running user code.

A rule stands for a type and what is derived from it. Objects of C that no rule knows and that have memory which no
attribute shows are *opaque*, unless their module is one of values: a step that reaches one stays eager.
"""

from __future__ import annotations

import array
import asyncio
import collections
import ctypes
import decimal
import enum
import functools
import gc
import io
import logging
import mmap
import operator
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.function_like import FunctionLike, PerInstance
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.layout import foreign_base, is_changeable
from hocket.pystate.origins import is_user_code, origin
from hocket.pystate.places import ABSENT, Group, Path, describe, is_a, is_immutable, items_of, members_of
from hocket.pystate.tokens import GENERATORS, ITERATORS, OF_NUMPY, OF_RANDOM, iterator_state
from hocket.pystate.torch_kinds import TorchKinds, is_ours
from hocket.pystate.walk import CODE_OF_OTHERS, MAX_VALUES, Reachable
from hocket.sinks import Sink

MAX_ARRAY_BYTES = 1 << 20

_LOGGING_SLOTS = frozenset(("level", "disabled", "handlers", "filters", "propagate"))

_MethodOfC = type(vars(torch._C.DispatchKeySet)["add"])  # of classes that pybind11 makes
_FieldOfTuple = type(vars(collections.namedtuple("_Pair", "first second"))["first"])
_IMMUTABLE: frozenset[type] = frozenset(
    (
        types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
        types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType,
        types.FrameType, types.TracebackType, re.Pattern, re.Match, operator.itemgetter, torch._ops.OpOverload,
        torch._ops.OpOverloadPacket, _FieldOfTuple, _MethodOfC, object, Sink,
    )
)  # fmt: skip
# Modules whose C types are values, or hold nothing that a step could read without being watched otherwise.
_TRUSTED_C = ("torch", "numpy", "typing", "_operator", "_sre", "datetime", "_decimal", "uuid", "_abc", "zoneinfo",
              "_struct", "_thread", "_weakref", "_collections")  # fmt: skip
# But torch's own that hold what Python sets and their C++ reads.
_UNSEEN = (torch.jit.ScriptModule, torch.ScriptObject, torch._C.ScriptList, torch._C.ScriptDict, torch.UntypedStorage)
# Functions of Cython's and pybind11's, which have modules of their own for their types.
_FUNCTIONS_OF_C = ("_cython_", "pybind11_builtins")


class Kinds(TorchKinds):
    """One method for each kind of object. `_RULES` maps types to methods."""

    def visit(self, value: Any, path: Path) -> None:
        kind = type(value)
        rule, has_attributes = _visitor(kind)  # type: ignore[arg-type]
        rule(self, value, path)
        if has_attributes and not is_ours(value):
            self.attributes(value, path)

    # ---------------------------------------------------------------------------------------------------- functions

    def function(self, value: types.FunctionType, path: Path) -> None:
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__]
        self.add("function", value, path, ["__code__", "__defaults__", "__kwdefaults__"], parts, ".")
        if is_user_code(value.__code__) and not any(value.__code__ is each for each in self.executed.divided):
            self.executed.add(value.__code__, value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if id(cell) not in self.done:
                self.done.add(id(cell))
                self.cell(cell, (path, "closure of {}: {}", name), name)

    def cell(self, value: types.CellType, path: Path, name: str = "content") -> None:
        try:
            content = value.cell_contents
        except ValueError:
            content = ABSENT  # not bound yet
        self.add("cell", value, path, (name,), (content,))

    def method(self, value: types.MethodType, path: Path) -> None:
        self.todo.append((value.__self__, (path, ".", "__self__")))
        self.todo.append((value.__func__, path))

    def partial(self, value: functools.partial[Any], path: Path) -> None:
        keys = ("func", "args", "keywords")
        self.add("readonly", value, path, keys, (value.func, value.args, value.keywords), ".")

    def scheduled(self, value: FunctionLike, path: Path) -> None:
        self.add("readonly", value, path, ("step",), (value.step,), ".")

    def builtin(self, value: Any, path: Path) -> None:
        owner = getattr(value, "__self__", None)
        if owner is not None and not is_a(owner, types.ModuleType):
            self.todo.append((owner, (path, ".", "__self__")))

    def descriptor(self, value: Any, path: Path) -> None:
        for name in ("__func__", "fget", "fset", "fdel", "func"):
            part = getattr(value, name, None)
            if part is not None:
                self.todo.append((part, path))

    def getter(self, value: Any, path: Path) -> None:
        """An object that reads attributes by the names that it holds."""
        names = {name for name in tree_leaves(gc.get_referents(value)) if type(name) is str}
        self.executed.names |= names
        self.executed.user_names |= names

    def cached(self, value: Any, path: Path) -> None:
        self.todo.append((value.__wrapped__, path))
        code = getattr(value.__wrapped__, "__code__", _NO_CODE)
        if origin(code.co_filename) == "user":
            info = value.cache_info()  # a hit reads what an earlier call with equal arguments has returned
            path = (path, "the cache of {}", None)
            self.state(value, path, (info.misses, info.currsize))
            for table in gc.get_referents(value):
                if type(table) is dict and table is not value.__dict__:  # entries of other calls may come
                    self.names(table, path, frozenset(table).__contains__)
            self.executed.asks_types[code.co_qualname] = None  # its keys are told apart by their types

    def link(self, value: Any, path: Path) -> None:
        """An entry of a bounded cache, which has a key and a result, and may get others."""
        self.setting(value, path, lambda: [*map(id, gc.get_referents(value))])
        self.todo.extend((part, path) for part in gc.get_referents(value))

    def suspended(self, value: types.GeneratorType[Any, Any, Any], path: Path) -> None:
        if value.gi_code in self.executed.codes:
            told = f"the step fetches from {describe(path)}: fetch before its first op, or outside the step"
            self.found.opaque[told] = None

    def coroutine(self, value: Any, path: Path) -> None:
        self.refuse(path, f"is a {type(value).__name__}, whose state cannot be seen")

    # ---------------------------------------------------------------------------------------- modules and streams

    def imported(self, value: types.ModuleType, path: Path) -> None:
        table = value.__dict__
        of_own_code = self.namespaces.get(id(table))  # names that its own functions use
        if id(table) in self.done and of_own_code is None:
            return
        self.done.add(id(table))
        is_known = sys.modules.get(value.__name__) is value and bool(value.__spec__ or hasattr(value, "__file__"))
        whose = origin(getattr(value, "__file__", None) or "<frozen") if is_known else "user"
        path = (None, "", value.__name__)
        if whose == "user":
            named = self.named_or(frozenset())
            if of_own_code is not None:  # others name what it holds besides
                named = _or_data(of_own_code, named, table)
            self.names(table, path, named)
            self.kind_of(value, path)
            return
        # By identity: torch.nn.functional.cross_entropy may be replaced. What was put there is looked into.
        names = self.executed.user_names | self.executed.user_strings  # `hasattr` asks by a string
        known = self.torchs_own(table) | frozenset(filter(of_own_code, table) if of_own_code else ())
        self.names(table, path, lambda key: (key in names and key != "modules") or key in known, but=CODE_OF_OTHERS)
        packages = [table[key] for key in names if type(table.get(key)) is types.ModuleType] if whose == "torch" else []
        self.todo += [(each, (path, ".", each.__name__)) for each in packages]
        if value is sys and "modules" in names:
            held = [each for each in sys.modules.values() if not is_a(each, types.ModuleType)]
            self.todo += [(each, (path, "an entry of {}.modules", None)) for each in held]

    def logger(self, value: Any, path: Path) -> None:
        self.attributes_of_user(value, path, _LOGGING_SLOTS)

    def stream(self, value: Any, path: Path) -> None:
        try:
            position: Any = value.tell()
        except (OSError, ValueError):
            position = None  # not seekable: a step that uses it is refused when it does
        if is_a(value, (io.BytesIO, io.StringIO)) and not value.closed:
            position = (position, value.getvalue())
        self.state(value, path, position)

    def shown(self, value: Any, path: Path) -> None:
        """An object whose text, up to its address, is its state."""
        self.setting(value, path, lambda: repr(value).split(" at ")[0])

    # ------------------------------------------------------------------------------------------ numbers and memory

    def generator_of_numbers(self, value: Any, path: Path) -> None:
        if value is not OF_RANDOM and value is not OF_NUMPY:  # those are looked at in any case
            self.generator(value, path)

    def array(self, value: np.ndarray[Any, Any], path: Path) -> None:
        plain = np.ndarray.view(value, np.ndarray)  # no code of a class that is derived from it
        if plain.nbytes > MAX_ARRAY_BYTES:
            size = plain.nbytes >> 20
            self.refuse(path, f"is an array of {size} MiB, too large to watch; make it a tensor")
        elif plain.dtype.hasobject:
            items = list(plain.flatten()) if plain.dtype == object else []
            if not items and plain.size:
                self.opaque(value, path)
            self.add("sequence", value, path, range(len(items)), items, "[]")
        else:
            self.add("buffer", value, path, ("",), (plain.tobytes(),))
            self.setting(value, path, functools.partial(_header, value))

    def buffer(self, value: Any, path: Path) -> None:
        with memoryview(value) as view:
            if view.nbytes > MAX_ARRAY_BYTES:
                self.refuse(path, f"has {view.nbytes >> 20} MiB, too large to watch")
            else:
                self.add("buffer", value, path, ("",), (view.tobytes(),))

    def of_ctypes(self, value: Any, path: Path) -> None:
        if is_a(value, ctypes._Pointer):
            self.opaque(value, path)
        else:
            self.buffer(value, path)

    def iterator(self, value: Any, path: Path) -> None:
        try:
            self.state(value, path, iterator_state(value))
        except (TypeError, ValueError, RecursionError):
            self.refuse(path, f"is a {type(value).__name__}, whose place cannot be read")

    # ---------------------------------------------------------------------------------------------------- containers

    def weak(self, value: Any, path: Path) -> None:
        target = value()
        if target is not None:
            self.weakly.append((target, path))

    def weak_proxy(self, value: Any, path: Path) -> None:
        target = getattr(object.__repr__(value), "__self__", None)
        if target is None:
            self.refuse(path, "is a weak proxy, whose object cannot be seen")

    def context(self, value: ContextVar[Any], path: Path) -> None:
        self.add("context", value, path, (value.name,), (value.get(None),))

    def entries(self, value: Context | types.MappingProxyType[Any, Any], path: Path) -> None:
        self.add("sequence", value, path, list(value), list(value.values()), "[]")

    def sequence(self, value: Any, path: Path) -> None:
        items = items_of(value)
        if self.are_few(len(items), "items", path):
            self.add("list" if is_a(value, list) else "sequence", value, path, range(len(items)), items, "[]")

    def members(self, value: Any, path: Path) -> None:
        items = items_of(value)
        if self.are_few(len(items), "members", path):
            self.found.groups[id(value), "set"] = Group("set", value, path, ("",), (members_of(items),))
            self.found.num_values += len(items)
            self.todo += [(each, (path, "member of {}", None)) for each in items if not is_immutable(each)]

    def exception(self, value: BaseException, path: Path) -> None:
        keys = ("args", "__cause__", "__context__")
        self.add("slots", value, path, keys, [object.__getattribute__(value, key) for key in keys], ".")

    def nothing(self, value: Any, path: Path) -> None:
        """No-op: immutable, or seen by its attributes alone."""

    def opaque(self, value: Any, path: Path) -> None:
        kind = type(value)
        self.refuse(path, f"is a {kind.__module__}.{kind.__name__}, whose state cannot be seen")


def _header(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Properties of an array that may be set in place, beside its content."""
    plain = np.ndarray.view(array, np.ndarray)
    return plain.dtype, plain.shape, plain.strides


def _or_data(one: Callable[[str], bool], other: Callable[[str], bool], table: dict[str, Any]) -> Callable[[str], bool]:
    return lambda key: one(key) or (other(key) and not is_a(table.get(key), CODE_OF_OTHERS))


_NO_CODE = (lambda: None).__code__

_RULES: tuple[tuple[Any, Callable[[Kinds, Any, Path], None]], ...] = (
    (torch.Tensor, Kinds.tensor),
    (types.FunctionType, Kinds.function),
    (types.MethodType, Kinds.method),
    (functools.partial, Kinds.partial),
    (FunctionLike, Kinds.scheduled),
    (PerInstance, Kinds.nothing),
    ((types.BuiltinFunctionType, types.MethodWrapperType), Kinds.builtin),
    ((staticmethod, classmethod, property, functools.cached_property), Kinds.descriptor),
    ((operator.attrgetter, operator.methodcaller), Kinds.getter),
    (functools._lru_cache_wrapper, Kinds.cached),
    (torch.utils.data.DataLoader, Kinds.attributes_of_user),
    (_UNSEEN, Kinds.opaque),
    (nn.Module, Kinds.module),
    (torch.optim.Optimizer, Kinds.optimizer),
    (type, Kinds.klass),
    (types.ModuleType, Kinds.imported),
    (types.GeneratorType, Kinds.suspended),
    ((types.CoroutineType, types.AsyncGeneratorType, asyncio.Future), Kinds.coroutine),
    (GENERATORS, Kinds.generator_of_numbers),
    (np.ndarray, Kinds.array),
    ((bytearray, memoryview, array.array, mmap.mmap), Kinds.buffer),
    ((ctypes._SimpleCData, ctypes.Structure, ctypes.Array, ctypes.Union, ctypes._Pointer), Kinds.of_ctypes),
    (ITERATORS, Kinds.iterator),
    (io.IOBase, Kinds.stream),
    (weakref.ref, Kinds.weak),
    (ContextVar, Kinds.context),
    ((logging.Logger, logging.Handler), Kinds.logger),
    ((type(threading.Lock()), type(threading.RLock()), decimal.Context), Kinds.shown),
    (types.CellType, Kinds.cell),
    (dict, Kinds.table),
    ((types.MappingProxyType, Context), Kinds.entries),
    ((list, tuple, collections.deque), Kinds.sequence),
    ((set, frozenset), Kinds.members),
    (BaseException, Kinds.exception),
    (types.GenericAlias, Kinds.nothing),
    ((int, float, complex, str, bytes, enum.Enum, threading.local, types.SimpleNamespace), Kinds.nothing),
)
# Kinds whose rules look at attributes themselves, or that need none.
_WITH_OWN_RULE = (
    torch.Tensor, nn.Module, torch.optim.Optimizer, type, types.ModuleType, logging.Logger, logging.Handler,
    torch.utils.data.DataLoader, FunctionLike, PerInstance,
)  # fmt: skip


@functools.cache
def _visitor(kind: type) -> tuple[Callable[[Kinds, Any, Path], None], bool]:
    """The rule for instances of a class, and True if further attributes of theirs may be the user's."""
    if kind in _IMMUTABLE:
        return Kinds.nothing, False
    # Tables of hooks are ordered dicts, whose `__dict__` would be made by asking for it.
    can_have = is_changeable(kind) or kind.__dictoffset__ != 0 or issubclass(kind, threading.local)
    return _rule(kind), can_have and kind is not collections.OrderedDict and not issubclass(kind, _WITH_OWN_RULE)


def _rule(kind: type) -> Callable[[Kinds, Any, Path], None]:
    for kinds, visit in _RULES:
        if issubclass(kind, kinds):
            return visit
    if kind in (weakref.ProxyType, weakref.CallableProxyType):
        return Kinds.weak_proxy
    if kind.__name__ == "_lru_list_elem":  # which Python has no name for
        return Kinds.link
    if kind.__name__ == "cython_function_or_method":  # each Cython has a type of its own
        return Kinds.builtin
    if kind.__module__.startswith(_FUNCTIONS_OF_C):
        return Kinds.nothing
    holder = foreign_base(kind)
    if holder is not None and not any((each.__module__ or "").startswith(_TRUSTED_C) for each in (holder, kind)):
        return Kinds.opaque
    return Kinds.nothing


def reachable(step: Any, roots: Iterable[Any], executed: ExecutedCode) -> Reachable:
    """Walk all plain state that `step` can reach, narrowed by the names of the code that ran.

    The walk starts at the step, its models and optimizers, and the globals of the executed code, and follows closures,
    defaults, attributes, containers, classes, hooks and partials. Nothing of the user's is called on the way: no
    property, no ``__getattr__``, no ``__len__``. Objects that cannot be looked into are named in `Reachable.opaque`.

    Left out, because a captured step handles it itself: gradients, the optimizer's state, the numbers of its parameter
    groups, and which tensor a buffer is. Left out by trust: the insides of torch, numpy and Python's own library, but
    for their switches and random generators. User functions that the walk meets are added to `executed`.
    """
    while True:
        known = len(executed.codes), len(executed.names)
        walk = Kinds(executed)
        walk.start(step, roots)
        # A function that the walk met may name attributes of objects that lie behind it.
        if (len(executed.codes), len(executed.names)) == known or walk.found.num_values > MAX_VALUES:
            return walk.found
