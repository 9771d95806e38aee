"""The walk over reachable state: the queue, and how groups are made of what an object holds. See `reachable`."""

from __future__ import annotations

import collections
import os
import random
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.pystate.executed import ExecutedCode
from hocket.pystate.layout import has_plain_dict, origin_of, slot_value, slots_of
from hocket.pystate.places import Group, Path, describe, is_plain

__all__ = ["MAX_ITEMS", "MAX_VALUES", "Reachable", "Walk"]

# Beyond these, watching a step would cost more than planning could win.
MAX_VALUES = 200_000
MAX_ITEMS = 20_000

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


class Reachable:
    """What one walk found.

    Attributes:
        groups: by owner and kind.
        opaque: what cannot be looked into, in words.
        num_values: how many values were seen.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, str], Group] = {}
        self.opaque: dict[str, None] = {}
        self.num_values = 0


class Walk(ABC):
    """Visits everything once, breadth first, so that a value is named by its shortest path."""

    def __init__(self, executed: ExecutedCode) -> None:
        self.executed = executed
        self.found = Reachable()
        self.done: set[int] = set()
        self.todo: collections.deque[tuple[Any, Path]] = collections.deque()
        self.weakly: list[tuple[Any, Path]] = []
        self.wide = bool(executed.dynamic)

    def start(self, step: Any, roots: Iterable[Any]) -> None:
        name = getattr(step, "__name__", type(step).__name__)
        if isinstance(step, types.MethodType):
            self.todo.append((step.__self__, (None, "", "self")))
            step = step.__func__
        self.todo.append((step, (None, "", name)))
        for number, root in enumerate(roots):
            kind = "optimizer" if isinstance(root, torch.optim.Optimizer) else "model"
            self.todo.append((root, (None, "", kind if number == 0 else f"{kind}{number}")))
        for namespace, names in list(self.executed.global_names.values()):
            self._globals(namespace, names)
        self._generators()
        modules = vars(torch.nn.modules.module)
        for hooks in _GLOBAL_HOOKS:
            self.todo.append((modules[hooks], (None, "", f"torch.nn.modules.module.{hooks}")))
        if not self.executed.names.isdisjoint(("environ", "getenv")):
            self.todo.append((os.environ._data, (None, "", "os.environ")))  # type: ignore[attr-defined]
        # Last what has no better name.
        unnamed = list(self.executed.persistent.values())
        if self._drain():
            self.todo.extend((value, (None, "", f"a {type(value).__name__} that the step uses")) for value in unnamed)
            if self._drain():
                self._check_weak()

    def _drain(self) -> bool:
        """Visit all that is waiting; False where there is too much."""
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
                self.found.opaque[f"{describe(path)} is a weak reference, whose object may go at any time"] = None

    def _generators(self) -> None:
        self.state(random, (None, "", "the state of random"), hash(random.getstate()))
        state = np.random.get_state()  # noqa: NPY002  # the user's, which a step may draw from
        self.state(np.random, (None, "", "the state of numpy.random"), (state[1].tobytes(), *state[2:]))  # type: ignore[index]

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
    ) -> None:
        group = Group(kind, owner, path, keys, values, form=form, rebindable=rebindable, counts=counts)
        self.found.groups[id(owner), kind] = group
        self.found.num_values += len(keys)
        for position, value in enumerate(values):
            if not is_plain(value) and id(value) not in self.done:
                self.todo.append((value, group.path_of(keys[position])))

    def state(self, owner: Any, path: Path, token: Any) -> None:
        self.found.groups[id(owner), "state"] = Group("state", owner, path, ("",), (token,))

    def table(self, table: dict[Any, Any], path: Path) -> None:
        """All entries of a dict."""
        if dict.__len__(table) > MAX_ITEMS:
            self.found.opaque[f"{describe(path)} has {dict.__len__(table)} entries, too many to watch"] = None
            return
        ordered = isinstance(table, collections.OrderedDict)
        keys = list((collections.OrderedDict if ordered else dict).__iter__(table))
        self.add("dict", table, path, keys, [dict.__getitem__(table, key) for key in keys], "[]")

    def names(self, table: dict[str, Any], path: Path, counts: Callable[[str], bool]) -> None:
        """The entries of a dict of attributes or globals that count."""
        keys = [key for key in table if counts(key)]
        self.add("dict", table, path, keys, [table[key] for key in keys], ".", counts=counts)

    def named_or(self, always: frozenset[str], never: frozenset[str] = frozenset()) -> Callable[[str], bool]:
        names, wide = self.executed.names, self.wide
        return lambda key: (wide or key in names or key in always) and key not in never

    def _globals(self, namespace: dict[str, Any], names: set[str]) -> None:
        self.done.add(id(namespace))
        self.names(namespace, (None, "", namespace.get("__name__", "globals")), names.__contains__)

    def attributes(
        self, value: Any, path: Path, always: frozenset[str] = frozenset(), never: frozenset[str] = frozenset()
    ) -> None:
        table = getattr(value, "__dict__", None) if has_plain_dict(type(value)) else None
        if type(table) is dict:
            self.names(table, path, self.named_or(always, never))
        keys = [key for key in slots_of(type(value)) if self.wide or key in self.executed.names]
        present = [(key, found) for key in keys for found in slot_value(value, key)]
        if present:
            self.add("slots", value, path, [key for key, _ in present], [found for _, found in present], ".")
        self.class_of(type(value))

    def class_of(self, kind: type) -> None:
        if id(kind) not in self.done:
            self._visit(kind, (None, "", kind.__qualname__))

    def klass(self, kind: type, path: Path) -> None:
        """The attributes of a class and its bases that count."""
        for base in kind.__mro__:
            whose = origin_of(base)
            names = self.executed.names
            if whose == "torch" and issubclass(base, nn.Module) and "forward" in vars(base):
                self.add("class", base, (None, "", base.__qualname__), ["forward"], [vars(base)["forward"]], ".")
            if whose in ("torch", "stdlib", ""):
                continue
            keys = [
                key for key in vars(base)
                if key in ("forward", "__call__") or (key in names and not key.startswith("__"))
            ]  # fmt: skip
            self.add("class", base, (None, "", base.__qualname__), keys, [vars(base)[key] for key in keys], ".")

    # ------------------------------------------------------------------------------------------ visiting values

    def _visit(self, value: Any, path: Path) -> None:
        if id(value) in self.done:
            return
        self.done.add(id(value))
        self.visit(value, path)

    @abstractmethod
    def visit(self, value: Any, path: Path) -> None:
        """Make groups of what `value` holds, and queue what is in them."""
