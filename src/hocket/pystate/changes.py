"""The values that differ between two walks over the state that a step can reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from hocket.pystate.places import (
    ABSENT,
    EMPTY_KINDS,
    Group,
    Place,
    are_like,
    containers_in,
    is_immutable,
    same,
    shown,
)
from hocket.pystate.walk import Reachable

# Findings that a message names.
MAX_NAMED = 5
# Groups of which a walk notes one value that stands for all.
_TOKENS = frozenset(("state", "set", "buffer", "setting"))


@dataclass(frozen=True, eq=False)
class Change:
    """One value that differs between two walks."""

    place: Place
    then: Any
    now: Any

    def __str__(self) -> str:
        if self.place.kind == "state":
            kind = type(self.place.owner)
            return self.place.name if kind is ModuleType else f"{self.place.name}, a {kind.__name__}"
        if self.then is ABSENT:
            return f"{self.place.name} (new: {shown(self.now)})"
        if self.now is ABSENT:
            return f"{self.place.name} (gone; it was {shown(self.then)})"
        return f"{self.place.name} ({shown(self.then)} -> {shown(self.now)})"


def differences(before: Reachable, after: Reachable) -> Iterator[Change]:
    """Return the values that differ between two walks, and keys that were added or removed where all keys count."""
    for key, now in after.groups.items():
        then = before.groups.get(key)
        if then is None or (then.values is now.values and then.keys is now.keys):
            continue
        for change in _changes(then, now):
            yield replace(change, then=_as_it_was(change.then, before))


def _as_it_was(value: Any, before: Reachable) -> Any:
    """The value at the first walk, of a list or dict that was empty then and has been filled since."""
    if type(value) in EMPTY_KINDS and value:
        group = before.groups.get((id(value), "list" if type(value) is list else "dict"))
        if group is not None and not group.keys:
            value = copy(value)
            value.clear()
    return value


def _changes(then: Group, now: Group) -> Iterator[Change]:
    if now.kind in _TOKENS:
        if then.values != now.values:
            yield Change(now.place(0), then.values[0], now.values[0])
        return
    if len(then.keys) == len(now.keys) and all(map(same, then.keys, now.keys)):
        for position, (old, new) in enumerate(zip(then.values, now.values, strict=True)):
            if not same(old, new) and not (now.rebindable and are_like(old, new)):
                yield Change(now.place(position), old, new)
        return
    if then.kind in ("list", "sequence"):
        place = Place("length", now.owner, None, (now.path, "the length of {}", None))
        yield Change(place, len(then.keys), len(now.keys))
        return
    old_values = {_hashable(key): (key, value) for key, value in zip(then.keys, then.values, strict=True)}
    for position, key in enumerate(now.keys):
        _, old = old_values.pop(_hashable(key), (key, ABSENT))
        if old is ABSENT and then.counts is not None and not then.counts(key):
            continue  # it did not count then
        if old is ABSENT or not same(old, now.values[position]):
            yield Change(now.place(position), old, now.values[position])
    for key, old in old_values.values():
        if now.counts is not None and not now.counts(key):
            continue  # it does not count now
        yield Change(Place(now.kind, now.owner, key, now.path_of(key)), old, ABSENT)
    if now.whole and len(then.keys) == len(now.keys) and not old_values:
        yield Change(Place("order", now.owner, None, (now.path, "the order of {}", None)), then.keys[0], now.keys[0])


def _hashable(key: Any) -> Any:
    return (type(key), key) if is_immutable(key) else id(key)


def containers_at(found: Reachable, rebound: Iterable[Any]) -> frozenset[int]:
    """The addresses of the tuples, lists and dicts at these places (given by their identities), and of those within."""
    return frozenset(id(each) for value in found.values_at(rebound) for each in containers_in(value))


def in_words(findings: Iterable[str]) -> str:
    """The first few findings in one line."""
    found = list(findings)
    more = f" (and {len(found) - MAX_NAMED} more)" if len(found) > MAX_NAMED else ""
    return "; ".join(found[:MAX_NAMED]) + more


def named(changes: Iterable[Change]) -> str:
    """The first few places that changed, in one line."""
    return in_words(str(change) for change in changes)
