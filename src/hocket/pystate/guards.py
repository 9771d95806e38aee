"""Guards: before every planned step, is all that the step reads what it was when the step was recorded?

Everything that a walk found (see `reachable`) is compared: plain values by equality, objects by identity, what they
hold by groups of their own. Of a number that the graph reads anew the type counts, and of a tensor that the step binds
anew the kind.

The native table (see ``native/guards.cpp``) costs about a nanosecond for each dict, module or tensor without writes
since the last check. Without a compiler the same comparison runs in Python, at some microseconds a hundred values.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from contextvars import Context
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hocket import native
from hocket.pystate.changes import Change, containers_at, differences
from hocket.pystate.guard_table import EQUAL, IDENTITY, NONE_THERE, NUMBER, TENSOR, TREE, TREE_OF_NUMBERS, PythonTable
from hocket.pystate.places import (
    ABSENT,
    EMPTY_KINDS,
    Group,
    are_like,
    is_a,
    is_empty,
    is_number,
    is_plain,
    items_of,
    members_of,
    same,
)
from hocket.pystate.torch_kinds import HOOK_TABLES
from hocket.pystate.walk import Reachable
from hocket.pystate.watch import PurityWatch

# The effect of a step on a place where it puts a tensor.
A_TENSOR = object()


class Guards:
    """Conditions under which a recorded step may replace the user's step.

    Args:
        found: the state before the recorded step.
        watch: knows how to look again, what the step binds anew and which numbers are read anew. What it finds out
            later is no concern of these guards.
        effects: what the step sets, by place: plain values, or `A_TENSOR` where there was none before.
    """

    def __init__(self, found: Reachable, watch: PurityWatch, effects: dict[Any, Any] | None = None) -> None:
        self._found = found
        self._watch = watch
        self._moving = frozenset(watch.moving if watch.executed.follows_numbers else ())
        self._rebound = frozenset(watch.rebound)
        self._follows = watch.executed.follows_numbers
        self._whole = frozenset(watch.written)
        self._look_at_containers()
        self._lists = frozenset(watch.appended)
        self._effects = effects or {}
        self._make_table()

    def _look_at_containers(self) -> None:
        self._refilled = _refilled(self._found, self._rebound)
        self._containers = containers_at(self._found, self._rebound)

    def _make_table(self) -> None:
        self._groups: list[Group] = []
        self._table: Any = native.load().GuardTable() if native.available() else PythonTable()
        self._empty_hooks: list[dict[Any, Any]] = []
        for key, group in self._found.groups.items():
            if key not in self._refilled:
                self._add(group)
        # One counter for all hook tables that are empty: torch numbers the hooks of a process one by one.
        self._groups.append(Group("hooks", RemovableHandle, (None, "", "hooks"), (), ()))
        self._hooks = self._table.add_class(RemovableHandle, ["next_id"], [RemovableHandle.next_id], [EQUAL])
        self._check: Callable[[], int] = self._table.check

    def __len__(self) -> int:
        return len(self._table)

    def hold(self) -> bool:
        """Return whether everything is as it was recorded."""
        failed = self._check()
        while failed >= 0 and self._is_about_others(failed):
            self._table.accept(failed)
            failed = self._check()
        return failed == -1

    @property
    def condition(self) -> Any:
        """The native table of checks, for direct calls."""
        return self._table

    def renew(self) -> bool:
        """Read all state again after a failed check. If nothing differs, guard the state as it is now.

        An object may have been exchanged for an equal one that the table knows by its address.
        """
        now = self._watch.look()
        keys = [key for key in self._found.groups if key not in self._refilled]
        gone = {key for key in keys if key not in now.groups}
        if self._changes(now):
            return False
        if any(not self._found.groups[key].is_passing and key[0] not in self._containers for key in gone):
            return False
        passing = [key for key, group in now.groups.items() if group.is_passing]
        kept = dict.fromkeys((*keys, *_refilled(now, self._rebound), *passing))
        self._found.groups = {key: now.groups[key] for key in kept if key not in gone}
        self._look_at_containers()
        self._make_table()
        return self.hold()

    def changes(self) -> list[Change]:
        """Return all changes since the recording, for messages and to find numbers that change between steps."""
        return self._changes(self._watch.look())

    def note_changes(self) -> tuple[list[Change], bool]:
        """Have the watch note what others have changed. With the changes comes True if it can follow all of them."""
        now = self._watch.look()
        changes = self._changes(now)
        return changes, not self._watch.note_between(changes, self._found, now)

    def unexpected(self) -> list[Change]:
        """After an eager step: all changes that are no output of the graph."""
        return [each for each in self._changes(self._watch.look(), spent=False) if not self._is_effect(each)]

    def _changes(self, now: Reachable, spent: bool = True) -> list[Change]:
        """All changes for which the graph is not valid. Without `spent`, no autograd graph counts that is used up."""
        return [
            change
            for change in differences(self._found, now)
            if change.place.kind != "state"
            and id(change.place.owner) not in self._lists
            and not self._is_followed(change, spent)
        ]

    def _is_followed(self, change: Change, spent: bool) -> bool:
        identity = change.place.identity
        if identity in self._moving and is_number(change.then):
            return type(change.then) is type(change.now)
        return self._is_read(identity) and are_like(change.then, change.now, numbers=self._follows, spent=spent)

    def _is_read(self, identity: Any) -> bool:
        """True if the graph reads the value at a place anew, or the container that it is in."""
        return identity in self._rebound or identity[1] in self._containers

    def _is_effect(self, change: Change) -> bool:
        place = change.place
        if place.identity not in self._effects:
            return False
        expected = self._effects[place.identity]
        if expected is A_TENSOR:
            return is_a(change.now, torch.Tensor)
        return same(expected, change.now) or (is_empty(expected) and are_like(expected, change.now))

    def _is_about_others(self, failed: int) -> bool:
        """Return whether a change is irrelevant: a hook on another module, or unused names in a dict."""
        if failed == self._hooks:
            return not any(self._empty_hooks)
        group = self._groups[failed]
        if group.counts is None or set(filter(group.counts, list(group.entries))) != set(group.keys):
            return False
        now = [group.entries[key] for key in group.keys]
        return all(
            type(here) is type(then) if how == NUMBER else same(here, then)
            for how, here, then in zip(self._hows(group), now, group.values, strict=True)
        )

    def _add(self, group: Group) -> None:
        table, kind, owner = self._table, group.kind, group.owner
        if id(owner) in self._lists:
            return  # the step appends to it, and does not read it
        if kind == "dict" and not group.keys and group.path[2] in HOOK_TABLES:
            self._empty_hooks.append(owner)
            return
        if kind in ("tensor", "type", "function", "buffer"):
            number = getattr(table, f"add_{kind}")(owner)
        elif kind == "cell":
            number = table.add_cell(owner, group.values[0], self._how(group, 0))
        elif kind == "list":
            number = table.add_list(owner, list(group.values), self._hows(group))
        elif kind == "dict":
            ordered = is_a(owner, collections.OrderedDict)
            number = table.add_dict(
                owner, list(group.keys), list(group.values), self._hows(group), group.whole, ordered
            )
        elif kind == "class":
            number = table.add_class(owner, list(group.keys), list(group.values), self._hows(group))
        elif kind == "context":
            number = table.add_test(lambda: same(owner.get(None), group.values[0]))
        elif kind == "setting":
            number = table.add_test(_safe(lambda: group.keys[0]() == group.values[0]))
        elif kind in ("slots", "readonly"):
            for position, (name, value) in enumerate(zip(group.keys, group.values, strict=True)):
                self._groups.append(group)
                number = table.add_slot(owner, name, value, self._how(group, position))
            return
        elif kind == "set" and type(owner) in (set, frozenset) and all(map(_is_safe_member, owner)):
            number = table.add_set(owner)
        elif kind in ("set", "sequence") and not is_a(owner, (tuple, frozenset)):
            number = table.add_test(_safe(_test_of(group)))
        else:
            return  # a tuple cannot change; reading a generator or an iterator advances it, which no pure step does
        assert number == len(self._groups), "tables number their groups one by one"
        self._groups.append(group)

    def _hows(self, group: Group) -> list[int]:
        return [self._how(group, position) for position in range(len(group.values))]

    def _how(self, group: Group, position: int) -> int:
        value = group.values[position]
        if value is ABSENT:
            return NONE_THERE
        identity = (group.kind, id(group.owner), group.keys[position])
        is_read = self._is_read(identity)
        if is_plain(value) and is_number(value):
            return NUMBER if identity in self._moving or (is_read and self._follows) else EQUAL
        if is_plain(value) and (not is_read or identity in self._whole):
            return EQUAL
        if is_a(value, torch.Tensor):
            return TENSOR if group.rebindable or is_read else IDENTITY
        tree = TREE_OF_NUMBERS if self._follows else TREE
        return tree if is_read else IDENTITY


def _refilled(found: Reachable, rebound: Iterable[Any]) -> tuple[Any, ...]:
    """The groups of empty lists and dicts that a step replaces by others, and may fill before."""
    replaced = {id(value) for value in found.values_at(rebound) if type(value) in EMPTY_KINDS}
    return tuple(key for key, group in found.groups.items() if key[0] in replaced and not group.keys)


def _is_safe_member(value: Any) -> bool:
    """Return whether looking the value up in a set runs no user code."""
    kind: Any = type(value)
    return is_plain(value) or (kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__)


def _test_of(group: Group) -> Callable[[], bool]:
    """Build the check that a set, a deque or the like still has the same members."""
    owner, values = group.owner, list(group.values)
    if group.kind == "set":
        return lambda: members_of(items_of(owner)) == values[0]

    def holds() -> bool:
        if is_a(owner, np.ndarray):
            now = list(np.ndarray.view(owner, np.ndarray).flat)
        else:
            now = list(owner.values()) if is_a(owner, (MappingProxyType, Context)) else items_of(owner)
        return len(now) == len(values) and all(map(same, now, values))

    return holds


def _safe(test: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a check so that it fails if user code raises in it."""

    def holds() -> bool:
        try:
            return test()
        except Exception:  # noqa: BLE001  # whatever it is: this state is not known to stand
            return False

    return holds
