"""The numbers at the places of a step: live ones stand there while it is recorded, plain ones before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hocket.pystate.places import same, shown
from hocket.tracing.scalars.live import Late, Live, plain_of
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Entry
from hocket.tracing.standing import value_now


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
