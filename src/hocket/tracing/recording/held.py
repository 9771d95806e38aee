"""Contents of the places of a step while it is recorded: live numbers, containers, and gradients that have no place.

``self.stats = {"loss": 0.3}`` is a place for each number and tensor in it. A step makes such a container anew, or
writes into the one that stands there. A planned step has to do the same: others may hold the old one.

Gradients of models and optimizers are places. A step may give others some, too: to a perturbation that it trains by
hand, to an auxiliary model. Those that it has from a closure become places when it is recorded again. For those of its
batch there is no place, and of those that it reads anew from a place nothing says whose the gradient is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from hocket.pystate.places import Followed, exact, is_a, is_number, is_plain, same, shown
from hocket.tracing.reasons import Reasons
from hocket.tracing.scalars.live import Late, Live, plain_of
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Entry, ValueOf
from hocket.tracing.standing import value_now
from hocket.tracing.state import Inventory

_Path = tuple[Any, ...]


class HeldNumbers:
    """Numbers at places, which the tape follows."""

    def __init__(self, entries: Iterable[Entry], tape: Tape) -> None:
        self._before = {entry: entry.get() for entry in entries}
        self._holders = {(id(entry.table), entry.key): entry.whole() for entry in self._before}
        self._tape = tape

    def begin(self) -> None:
        """Put live numbers in their places."""
        for entry, value in self._before.items():
            entry.put(self._tape.leaf(entry, value))

    @contextmanager
    def plain(self, note: Callable[[str], object]) -> Iterator[None]:
        """While code runs that is not followed, let live numbers be plain. `note` gets each place that it sets."""
        live = {entry: value for entry in self._before if isinstance(value := value_now(entry), (Live, Late))}
        for entry, value in live.items():
            entry.put(value.plain)
        try:
            yield
        finally:
            for entry, value in live.items():
                if same(now := value_now(entry), value.plain):
                    entry.put(value)
                else:
                    note(f"{entry.name} to {shown(now)}")

    def set_so_far(self) -> Iterator[tuple[Entry, Any]]:
        """The numbers that the step has set."""
        for entry, before in self._before.items():
            value = value_now(entry)
            if isinstance(value, Live):
                function, operand = self._tape.entries[value.entry]
                if function is not None or self._tape.leaves[operand] is not entry:
                    yield entry, value
            elif self._tape.follows or not same(before, value):  # else it is guarded
                yield entry, value

    def put_back(self, undoes: bool) -> None:
        """Put plain numbers in the places of live ones. Tuples that held them come back if nothing changed."""
        changed: set[tuple[int, Any]] = set()
        for entry, before in self._before.items():
            place = (id(entry.table), entry.key)
            if undoes and entry.path and entry.whole() is not self._holders[place]:
                entry.table[entry.key] = self._holders[place]
            now = before if undoes else value_now(entry)
            if undoes or isinstance(now, (Live, Late)):
                entry.put(plain_of(now))
            if not same(plain_of(now), before):
                changed.add(place)
        for entry in self._before:
            place = (id(entry.table), entry.key)
            if entry.path and place not in changed and type(self._holders[place]) is tuple:
                entry.table[entry.key] = self._holders[place]


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


class Leaf:
    """Gradient of a tensor that belongs to no model, as it is at construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._requires_grad = tensor, tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._version = None if self._gradient is None else self._gradient._version

    @property
    def has_changed(self) -> bool:
        """The tensor has another gradient now, its gradient has been written, or it has come to require one."""
        now = self.tensor.grad if self.tensor.is_leaf else None
        version = None if now is None else now._version
        return now is not self._gradient or version != self._version or self.tensor.requires_grad != self._requires_grad

    def put_back(self) -> None:
        """Give the tensor its gradient back. Writes into that gradient are undone elsewhere."""
        self.tensor.grad = self._gradient


class OutsideLeaves:
    """The tensors of a step that cannot have a gradient by plan, as they are before it."""

    def __init__(self, batch: Iterable[Any], places: Mapping[Any, torch.Tensor]) -> None:
        self._of_kind = {
            "trains its batch": [Leaf(leaf) for leaf in batch if isinstance(leaf, torch.Tensor)],
            "trains unseen": [Leaf(tensor) for entry, tensor in places.items() if entry.kind == "object"],
        }

    def note(self, reasons: Reasons, line: str) -> None:
        """Add a reason for each that has got a gradient."""
        for kind, leaves in self._of_kind.items():
            for leaf in leaves:
                if leaf.has_changed:
                    reasons.add(kind, f"a tensor of shape {tuple(leaf.tensor.shape)}", line)

    def put_back(self) -> None:
        """Give each its gradient back."""
        for leaves in self._of_kind.values():
            for leaf in leaves:
                leaf.put_back()
