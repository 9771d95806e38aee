"""Walks over the state that a step can reach: the queue, and groups of attributes. See `kinds.reachable`.

Every object is looked into by what Python says of its layout: the dict of its instance, its slots, its class. `kinds`
adds what containers and objects of C hold besides.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import functools
import os
import random
import sys
import types
from abc import ABC, _get_dump, abstractmethod  # type: ignore[attr-defined]
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.pystate import settings
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.layout import instance_dict, is_changeable, origin_of, slot_value, slots_of
from hocket.pystate.origins import is_user_code
from hocket.pystate.places import ABSENT, Group, Path, describe, is_a, is_immutable, is_number, same
from hocket.pystate.tokens import generator_of, generator_state

# Beyond these, watching a step would cost more than planning could win.
MAX_VALUES = 200_000
MAX_ITEMS = 20_000

_GLOBAL_HOOKS = {
    torch.nn.modules.module: (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    ),
    sys.modules[torch.optim.Optimizer.__module__]: ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}  # fmt: skip
_NAMESPACES = ("f_globals", "__globals__", "modules")  # of a frame, a function, and `sys`
# Python code and what describes it: of torch's and Python's own it is guarded by identity, and not looked into.
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod, classmethod,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
CODE_OF_OTHERS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


class Reachable:
    """State found by one walk."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, str], Group] = {}  # by owner and kind
        self.opaque: dict[str, None] = {}  # what cannot be looked into, in words
        self.num_values = 0  # how many values were seen

    def values_at(self, identities: Iterable[Any]) -> Iterator[Any]:
        """The values at the places of these identities."""
        for kind, owner, key in identities:
            if (group := self.groups.get((owner, kind))) is not None:
                yield from (value for each, value in zip(group.keys, group.values, strict=True) if same(each, key))


class Walk(ABC):
    """Visits everything once, breadth first, so that a value is named by its shortest path."""

    def __init__(self, executed: ExecutedCode) -> None:
        self.executed = executed
        self.found = Reachable()
        self.done: set[int] = set()
        self.todo: collections.deque[tuple[Any, Path]] = collections.deque()
        self.weakly: list[tuple[Any, Path]] = []
        self.wide = bool(executed.dynamic)
        # Names that are met later are no concern of these groups: what they name is not new then.
        self.names_now, self.users_names_now = frozenset(executed.names), frozenset(executed.user_names)
        # addresses of the modules and optimizers that a captured step trains. It reads and writes their tensors and
        # numbers wherever they stand.
        self.own: set[int] = set()
        self.namespaces: dict[int, Callable[[str], bool]] = {}

    def start(self, step: Any, roots: Iterable[Any]) -> None:
        name = getattr(step, "__name__", type(step).__name__)
        if is_a(step, types.MethodType):
            self.todo.append((step.__self__, (None, "", "self")))
            step = step.__func__
        self.todo.append((step, (None, "", name)))
        for number, root in enumerate(roots):
            kind = "optimizer" if is_a(root, torch.optim.Optimizer) else "model"
            self.todo.append((root, (None, "", kind if number == 0 else f"{kind}{number}")))
            self.own.update([id(root)] if kind == "optimizer" else map(id, root.modules()))
        for namespace, names in list(self.executed.global_names.values()):
            self._globals(namespace, names)
        for source in (random, np.random):
            self.generator(source, (None, "", f"the state of {source.__name__}"))
        for name in self.executed.imports:
            if type(module := sys.modules.get(name)) is types.ModuleType:
                self.todo.append((module, (None, "", name)))
        for module, tables in _GLOBAL_HOOKS.items():
            self.todo += [(vars(module)[hooks], (None, "", f"{module.__name__}.{hooks}")) for hooks in tables]
        self._settings()
        # Last what has no better name.
        if self._drain():
            held_weakly = {id(target) for target, _ in self.weakly}  # and by nothing else, where it is not done
            unnamed = [value for value in self.executed.outliving() if id(value) not in held_weakly]
            self.todo.extend((value, (None, "", f"a {type(value).__name__} that the step uses")) for value in unnamed)
            for table, _ in list(self.executed.torchs_names.values()):
                if id(table) not in self.done and (own := self.torchs_own(table)):
                    self.done.add(id(table))
                    self.names(table, (None, "", table["__name__"]), own.__contains__, but=CODE_OF_OTHERS)
            if self._drain():
                self._check_weak()

    def _drain(self) -> bool:
        """Visit all waiting objects. Return False if there are too many."""
        while self.todo:
            value, path = self.todo.popleft()
            self._visit(value, path)
            if self.found.num_values > MAX_VALUES:
                found = f"the step reaches more than {MAX_VALUES} values ({describe(path)} is one of them)"
                self.found.opaque[found] = None
                return False
        return True

    def _check_weak(self) -> None:
        for target, path in self.weakly:
            if id(target) not in self.done:
                self.refuse(path, "is a weak reference, whose object may go at any time")

    def _settings(self) -> None:
        """Settings of the process, where code of the user's names them."""
        names = self.executed.user_names
        if not names.isdisjoint(("environ", "getenv")):
            self.todo.append((os.environ._data, (None, "", "os.environ")))  # type: ignore[attr-defined]
        if not names.isdisjoint(("getcontext", "localcontext", "setcontext")):
            self.todo.append((decimal.getcontext(), (None, "", "the context of decimal")))
        for each in (*settings.KERNELS, *settings.OTHERS):
            if not each.names.isdisjoint(names):
                self.setting(each, (None, "", each.name), each.read)

    # ------------------------------------------------------------------------------------------- making groups

    def add(
        self,
        kind: str,
        owner: Any,
        path: Path,
        keys: Any,
        values: Any,
        form: str = "",
        *,
        rebindable: bool = False,
        counts: Callable[[str], bool] | None = None,
        but: tuple[type, ...] = (),
    ) -> None:
        """Add a group, and queue its values, except for those of the types `but`."""
        group = Group(kind, owner, path, keys, values, form=form, rebindable=rebindable, counts=counts)
        self.found.groups[id(owner), kind] = group
        self.found.num_values += len(keys)
        for position, value in enumerate(values):
            kind_of_value = type(value)
            if is_immutable(value) or id(value) in self.done:
                continue
            is_users = kind_of_value is types.FunctionType and is_user_code(value.__code__)
            if not issubclass(kind_of_value, but) or is_users:  # who may have put it in the place of torch's
                self.todo.append((value, group.path_of(keys[position])))

    def refuse(self, path: Path, why: str) -> None:
        """Note an object for which the step stays eager."""
        self.found.opaque[f"{describe(path)} {why}"] = None

    def are_few(self, num: int, what: str, path: Path) -> bool:
        """Return False, and refuse the object, if it holds too much."""
        if num > MAX_ITEMS:
            self.refuse(path, f"has {num} {what}, too many to watch")
        return num <= MAX_ITEMS

    def state(self, owner: Any, path: Path, token: Any) -> None:
        """State that advances when it is read: compared, and never guarded."""
        self.found.groups[id(owner), "state"] = Group("state", owner, path, ("",), (token,))

    def generator(self, owner: Any, path: Path) -> None:
        """A generator. One that the step seeds is guarded, too: each step may leave it in the state that it found."""
        read, executed = functools.partial(generator_state, generator_of(owner)), self.executed
        self.state(owner, path, read())
        seeds = executed.seeds or (is_a(owner, np.random.RandomState) and "seed" in executed.user_names)
        if seeds and not executed.asks_draws and id(owner) not in executed.restored:
            self.setting(owner, path, read)

    def setting(self, owner: Any, path: Path, read: Callable[[], Any]) -> None:
        """State of an object of C that a function reads. It is guarded by calling that again."""
        self.found.groups[id(owner), "setting"] = Group("setting", owner, path, (read,), (read(),))

    def table(self, table: dict[Any, Any], path: Path) -> None:
        """All entries of a dict, and the named ones of Python's builtins, which any dict of globals holds."""
        if table is vars(builtins):
            self.names(table, (None, "", "builtins"), self.executed.user_names.__contains__, but=_CODE)
            return
        if not self.are_few(dict.__len__(table), "entries", path):
            return
        ordered = is_a(table, collections.OrderedDict)
        keys = list((collections.OrderedDict if ordered else dict).__iter__(table))
        self.add("dict", table, path, keys, [dict.__getitem__(table, key) for key in keys], "[]")

    def names(self, table: dict[str, Any], path: Path, counts: Callable[[str], bool], **options: Any) -> None:
        """The entries of a dict of attributes or globals that count. For options see `add`."""
        keys = [key for key in dict.__iter__(table) if counts(key)]
        self.add(
            "dict", table, path, keys, [dict.__getitem__(table, key) for key in keys], ".", counts=counts, **options
        )

    def kind_of(self, value: Any, path: Path) -> None:
        """The class of an object, where it can be given another, and the bases of a class."""
        if is_a(value, type):
            keys: Any = ("__class__", "__mro__")
            values: Any = (type(value), vars(type)["__mro__"].__get__(value))
        elif is_changeable(type(value)) or is_a(value, types.ModuleType):
            keys, values = ("__class__",), (type(value),)
        else:
            return
        self.add("type", value, path, keys, values, ".", but=(type, tuple))

    def named_or(self, always: frozenset[str], never: frozenset[str] = frozenset()) -> Callable[[str], bool]:
        names, wide = self.names_now, self.wide
        return lambda key: (wide or key in names or key in always) and key not in never

    def torchs_own(self, table: dict[str, Any]) -> frozenset[str]:
        """The names of a module that torch's own code calls, and its switches (`torch.backends.mha` has one)."""
        _, names = self.executed.torchs_names.get(id(table), (table, ()))
        return frozenset(name for name in names if callable(found := table.get(name, callable)) or type(found) is bool)

    def _globals(self, namespace: dict[str, Any], names: set[str]) -> None:
        self.done.add(id(namespace))
        path = (None, "", namespace.get("__name__", "globals"))
        executed = self.executed
        # A name may be spelled as a string then, or be computed.
        by_text = "globals" in names or (self.wide and not executed.user_names.isdisjoint(_NAMESPACES))

        def counts(key: str) -> bool:
            return key in names or (by_text and (key in executed.names or is_number(namespace.get(key))))

        self.namespaces[id(namespace)] = counts
        self.names(namespace, path, counts)
        table = vars(builtins)
        if any(name not in namespace and name in table for name in names):
            self._visit(table, path)

    def attributes(
        self, value: Any, path: Path, always: frozenset[str] = frozenset(), never: frozenset[str] = frozenset()
    ) -> None:
        """The attributes of an object that count, and those of its class."""
        self.own_attributes(value, path, self.named_or(always, never))
        self.class_of(type(value))

    def attributes_of_user(self, value: Any, path: Path, always: frozenset[str] = frozenset()) -> None:
        """The attributes of an object of Python's or torch's that code of the user's names."""
        names = self.executed.user_names
        self.own_attributes(value, path, lambda key: key in names or key in always, but=_CODE)

    def own_attributes(
        self, value: Any, path: Path, counts: Callable[[str], bool], *, but: tuple[type, ...] = ()
    ) -> None:
        """The class of an object, and those of its attributes that count, which may all be set later."""
        self.kind_of(value, path)
        table = instance_dict(value)
        if table is not None and id(table) not in self.done:
            self.done.add(id(table))
            self.names(table, path, counts, but=but)
        slots = {key: (*slot_value(value, key), ABSENT)[0] for key in slots_of(type(value)) if counts(key)}
        if slots:
            self.add("slots", value, path, list(slots), list(slots.values()), ".", but=but)

    def class_of(self, kind: type) -> None:
        if id(kind) not in self.done:
            self._visit(kind, (None, "", kind.__qualname__))

    def klass(self, kind: type, path: Path) -> None:
        """The attributes of a class, its bases and its metaclass that count."""
        if type(kind) is not type:
            self.class_of(type(kind))
        for base in kind.__mro__:
            self.done.add(id(base))
            if (id(base), "class") in self.found.groups:
                continue
            whose = origin_of(base)
            is_user = whose in ("user", "library")
            # Torch's code calls methods of what it knows: a trainer of the user's has `log` for the user's code alone.
            is_known = not is_user or any(origin_of(each) not in ("user", "library") for each in base.__mro__[:-1])
            names = self.names_now if whose == "torch" or (is_user and is_known) else self.users_names_now
            always = ("forward", "__call__") if is_user or issubclass(base, nn.Module) else ()
            counts = _of_class(always, names, self.executed.user_strings, vars(base) if self.wide and is_user else {})
            keys = list(filter(counts, vars(base)))
            # One without any, too: they may be set later.
            if is_changeable(base) and (keys or is_user or whose == "torch"):
                name: Path = (None, "", base.__qualname__)
                values = [vars(base)[key] for key in keys]
                self.add("class", base, name, keys, values, ".", counts=counts, but=() if is_user else _CODE)
                self.kind_of(base, name)
                if is_user and not self.executed.user_names.isdisjoint(("isinstance", "issubclass")):
                    self._registered(base, name)

    def _registered(self, kind: type, path: Path) -> None:
        """The classes that count as derived from an abstract one."""
        if "_abc_impl" in vars(kind):
            self.setting(kind, (path, "the classes registered with {}", None), lambda: _get_dump(kind)[0])

    # ------------------------------------------------------------------------------------------ visiting values

    def _visit(self, value: Any, path: Path) -> None:
        if id(value) in self.namespaces:
            # Held as a dict: any entry may be read, by any name.
            del self.namespaces[id(value)]
            self.names(value, path, lambda key: not issubclass(type(value.get(key)), _CODE))
        if id(value) in self.done:
            return
        self.done.add(id(value))
        try:
            self.visit(value, path)
        except Exception as error:  # noqa: BLE001  # code of an object's own class may do anything
            self.refuse(
                path, f"cannot be looked into ({type(error).__name__}: {error}): keep it out of the step's reach"
            )

    @abstractmethod
    def visit(self, value: Any, path: Path) -> None:
        """Make groups of what `value` holds, and queue what is in them."""


def _of_class(
    always: Iterable[str], names: Container[str], strings: Container[str], table: Mapping[str, Any]
) -> Callable[[str], bool]:
    """Tell which attributes of a class count: those that are named, and what `table` has besides code."""

    def counts(key: str) -> bool:
        is_held = key in table and not issubclass(type(table[key]), _CODE)
        return key in always or ((key in names or key in strings or is_held) and not key.startswith("__"))

    return counts


def restored(last: Reachable, before: Reachable, after: Reachable) -> Iterator[int]:
    """The addresses of generators that others have moved since the last step, and that the step has left so."""
    for key, group in after.groups.items():
        found = [each.groups[key].values for each in (last, before) if key in each.groups]
        if group.kind == "state" and len(found) == 2 and found[0] != found[1] == group.values:
            yield key[0]
