"""Tuples, lists and dicts at places, whose numbers and tensors are places of their own: ``self.stats = {"loss": 0.3}``.

A step makes such a container anew, or writes into the one that stands there. A planned step has to do the same: others
may hold the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import copy
from typing import Any

import torch

from hocket.pystate.places import Followed, exact, is_a, is_number, is_plain, shown
from hocket.tracing.sources import Entry, ValueOf
from hocket.tracing.state import Inventory

_Path = tuple[Any, ...]


class Containers:
    """The containers at places of one recorded step."""

    def __init__(
        self, places: Inventory, owned: Collection[int], add: Callable[[str, str, Entry | None], None]
    ) -> None:
        self._owned, self._add = owned, add
        entries = [entry for entry in (*places.tensors, *places.numbers) if entry.path]
        self._tables: tuple[ValueOf, ...] = tuple(
            {id(entry.table): entry.table for entry in entries if type(entry.table) is ValueOf}.values()
        )
        self._before = {table: _Before(table.place.get()) for table in self._tables}
        self._known = {address for before in self._before.values() for address in before.addresses}
        self._entries: dict[int, Entry] = {}

    def end(self) -> None:
        """See which ones the step has made anew, when it is over."""
        for table in self._tables:
            before, value = self._before[table], table.place.get()
            now = {id(each): path for path, each in _lists(value)}
            table.in_place = value is before.value
            if table.in_place:
                is_clear = list(now) == before.addresses
            else:  # others may hold the one that is made anew, and the one that stood there
                is_one = self._known.isdisjoint(now) and self._entries.keys().isdisjoint(now)
                is_clear = is_one and not before.is_written
            if not is_clear or _layout(value) != before.layout:
                entry = Entry("object", table.place.name, table, table.place.key)
                of = "of another layout, that stands elsewhere, or after it has written the one before"
                self._add("sets a value", f"{entry.name} to {shown(value)} {of}", entry)
            for address, path in now.items():
                entry = Entry("object", table.place.name, table, table.place.key, path=path)
                self._entries.setdefault(address, entry)

    def leaf(self, value: Any) -> tuple[str, Any] | None:
        """A leaf of the result (see `Result`) for a list or dict that a planned step returns as it stands, or None."""
        if (entry := self._entries.get(id(value))) is not None:
            return "place", entry
        if id(value) in self._known:
            self._add("returns replaced", "", None)
        return ("value", value) if id(value) in self._owned else None


class _Before:
    """A value at the begin of the step, its lists and dicts, and its layout."""

    def __init__(self, value: Any) -> None:
        self.value, self.layout = value, _layout(value)
        self._copies = [(each, copy(each)) for _, each in _lists(value)]

    @property
    def addresses(self) -> list[int]:
        return list(dict.fromkeys(id(each) for each, _ in self._copies))

    @property
    def is_written(self) -> bool:
        """True if the step has written one of the lists and dicts."""
        return any(_identities(each) != _identities(was) for each, was in self._copies)


def _identities(value: Any) -> list[int]:
    return [*map(id, value), *(map(id, value.values()) if isinstance(value, dict) else ())]


def _lists(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """The lists and dicts in a value, with their paths."""
    if isinstance(value, (list, dict)):
        yield path, value
    for key, element in _items(value):
        yield from _lists(element, (*path, key))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (tuple, list)) and type(value) is not torch.Size:
        yield from enumerate(value)


def _layout(value: Any) -> Any:
    """All but the numbers and the tensors of a container."""
    if isinstance(value, (tuple, list, dict)) and type(value) is not torch.Size:
        return type(value), tuple([(_key(key), _layout(element)) for key, element in _items(value)])
    if is_a(value, Followed) or is_number(value):
        return "number"
    return "tensor" if is_a(value, torch.Tensor) else _key(value)


def _key(value: Any) -> Any:
    return (type(value), exact(value)) if is_plain(value) else id(value)
