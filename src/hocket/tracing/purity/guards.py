"""Guards: before every planned step, is all that the step reads what it was when the step was captured?

Everything that a walk found (see `reachable`) is compared: plain values by equality, objects by identity, what they
hold by groups of their own. Not compared are the numbers that the graph reads anew, and which tensor stands at a place
that the step binds anew itself; of those the type or the kind counts.

The native table (see ``native/guards.cpp``) costs about a nanosecond for each dict, module or tensor that nobody wrote
to since the last check. Without a compiler the same comparison runs in Python, at some microseconds a hundred values.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hocket import native
from hocket.tracing.purity.guard_table import PythonTable
from hocket.tracing.purity.places import Group, is_plain, members_of, same
from hocket.tracing.purity.reachable import HOOK_TABLES, Reachable
from hocket.tracing.purity.watch import Change, PurityWatch, differences

__all__ = ["Guards"]

# How a value is compared; the numbers are those of native/guards.cpp.
IDENTITY, EQUAL, NUMBER, TENSOR = range(4)


class Guards:
    """What has to hold for a captured step to stand for the user's.

    Args:
        found: the state that was captured.
        watch: knows how to look again, which numbers are read anew and what the step binds anew.
        moving: places whose number the graph reads anew.

    Example:
        >>> guards = Guards(watch.look(), watch)  # doctest: +SKIP
        >>> guards.hold()  # doctest: +SKIP
        True
    """

    def __init__(self, found: Reachable, watch: PurityWatch, moving: Collection[Any] | None = None) -> None:
        self._found = found
        self._watch = watch
        self._moving = frozenset(watch.moving if moving is None else moving)
        self._groups: list[Group] = []
        self._table: Any = native.load().GuardTable() if native.available() else PythonTable()
        self._empty_hooks: list[dict[Any, Any]] = []
        for group in found.groups.values():
            self._add(group)
        # One counter for all hook tables that are empty: torch numbers the hooks of a process one by one.
        self._groups.append(Group("hooks", RemovableHandle, (None, "", "hooks"), (), ()))
        self._hooks = self._table.add_class(RemovableHandle, ["next_id"], [RemovableHandle.next_id], [EQUAL])
        self._table.guard_flags()
        self._table.finish()
        self._check: Callable[[], int] = self._table.check

    def __len__(self) -> int:
        return len(self._table)

    def hold(self) -> bool:
        """Whether everything is as it was captured."""
        failed = self._check()
        while failed >= 0 and self._is_about_others(failed):
            self._table.accept(failed)
            failed = self._check()
        return failed == -1

    @property
    def condition(self) -> Any:
        """The native table, which holds where `hold` has nothing to look into; for direct calls."""
        return self._table

    def _is_about_others(self, failed: int) -> bool:
        """Whether a hook went to another module, or a dict has only gained or lost names that the step does not use."""
        if failed == self._hooks:
            return not any(self._empty_hooks)
        group = self._groups[failed]
        if group.counts is None or set(filter(group.counts, list(group.owner))) != set(group.keys):
            return False
        now = [group.owner[key] for key in group.keys]
        return all(
            how == NUMBER or same(*pair) for how, *pair in zip(self._hows(group), now, group.values, strict=True)
        )

    def changes(self) -> list[Change]:
        """All that is not as it was captured; for messages, and to find numbers that move."""
        expected = (*self._moving, *self._watch.rebound)
        found = differences(self._found, self._watch.look())
        lists = self._watch.appended
        return [
            change
            for change in found
            if change.place.kind != "state"
            and change.place.identity not in expected
            and id(change.place.owner) not in lists
        ]

    def _add(self, group: Group) -> None:
        table, kind, owner = self._table, group.kind, group.owner
        if id(owner) in self._watch.appended:
            return  # the step appends to it, and does not read it
        if kind == "dict" and not group.keys and group.path[2] in HOOK_TABLES:
            self._empty_hooks.append(owner)
            return
        if kind == "tensor":
            number = table.add_tensor(owner)
        elif kind == "function":
            number = table.add_function(owner)
        elif kind == "buffer":
            number = table.add_buffer(owner)
        elif kind == "cell":
            number = table.add_cell(owner, group.values[0], self._how(group, 0))
        elif kind == "list":
            number = table.add_list(owner, list(group.values), self._hows(group))
        elif kind == "dict":
            ordered = isinstance(owner, collections.OrderedDict)
            number = table.add_dict(
                owner, list(group.keys), list(group.values), self._hows(group), group.whole, ordered
            )
        elif kind == "class":
            number = table.add_class(owner, list(group.keys), list(group.values), self._hows(group))
        elif kind == "slots":
            for position, (name, value) in enumerate(zip(group.keys, group.values, strict=True)):
                self._groups.append(group)
                number = table.add_slot(owner, name, value, self._how(group, position))
            return
        elif kind == "set" and all(map(_is_safe_member, owner)):
            number = table.add_set(owner)
        elif kind in ("set", "sequence") and not isinstance(owner, (tuple, frozenset)):
            number = table.add_test(_test_of(group))
        else:
            return  # a tuple cannot change; reading a generator or an iterator advances it, which no pure step does
        assert number == len(self._groups), "tables number their groups one by one"
        self._groups.append(group)

    def _hows(self, group: Group) -> list[int]:
        return [self._how(group, position) for position in range(len(group.values))]

    def _how(self, group: Group, position: int) -> int:
        value = group.values[position]
        if is_plain(value):
            identity = (group.kind, id(group.owner), group.keys[position])
            return NUMBER if identity in self._moving else EQUAL
        if isinstance(value, torch.Tensor):
            identity = (group.kind, id(group.owner), group.keys[position])
            return TENSOR if group.rebindable or identity in self._watch.rebound else IDENTITY
        return IDENTITY


def _is_safe_member(value: Any) -> bool:
    """Whether looking it up in a set runs no code of the user's."""
    return is_plain(value) or (_default(value, "__hash__") and _default(value, "__eq__"))


def _default(value: Any, method: str) -> bool:
    return getattr(type(value), method) is getattr(object, method)


def _test_of(group: Group) -> Callable[[], bool]:
    """Whether a set, a deque or the like still holds what it held."""
    owner, values = group.owner, list(group.values)

    def holds() -> bool:
        now = _contents(owner)
        return len(now) == len(values) and all(map(same, now, values))

    return (lambda: members_of(owner) == values[0]) if group.kind == "set" else holds


def _contents(owner: Any) -> list[Any]:
    if isinstance(owner, ContextVar):
        return [owner.get(None)]
    if isinstance(owner, np.ndarray):
        return list(owner.flat)
    return list(owner.values() if isinstance(owner, MappingProxyType) else owner)
