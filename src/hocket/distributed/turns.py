"""Turns: which parcel a sender sends the next chunk of.

A parcel in the order has its turn when all before it have left; the order begins anew after its last one. One that is
not in the order, and is ready, goes before whatever has the turn. Few chunks are on their way at a time, so that it
does not wait for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hocket.distributed.parcels import Moving

__all__ = ["Leaving", "Turns"]

MAX_ON_THE_WAY = 4


@dataclass
class Leaving:
    """A chunk on its way: of which parcel, what the process group has of it once sent, and whether it is there."""

    number: int
    moving: Moving
    work: Any = None
    has_arrived: bool = False

    def sent(self, work: Any) -> Any:
        """The group has sent it: what the sender has to wait for. A work is waited for once, by who comes second."""
        if self.has_arrived:
            return work
        self.work = work
        return None

    def arrived(self) -> Any:
        """The peer has it: what whoever heard of that has to wait for."""
        self.has_arrived = True
        work, self.work = self.work, None
        return work


class Turns:
    """Of one end of a wire; whoever calls this holds that wire's lock.

    Attributes:
        ready: parcels by their number: asked for, and all values are there.
        on_the_way: chunks that have left and not arrived.

    Example:
        >>> turns = Turns()
        >>> turns.add([3, 1])
        >>> turns.ready[1] = Moving(epoch=1)
        >>> turns.next() is None  # it is the turn of number 3
        True
        >>> turns.ready[7] = Moving(epoch=1)
        >>> turns.next()
        7
    """

    def __init__(self) -> None:
        self.ready: dict[int, Moving] = {}
        self.on_the_way: deque[Leaving] = deque()
        self._order: list[int] = []
        self._has_turns: set[int] = set()
        self._turn = 0

    def add(self, numbers: Iterable[int]) -> None:
        """More parcels, at the end of the order."""
        self._order += numbers
        self._has_turns.update(self._order)

    def next(self) -> int | None:
        """The number of the parcel whose next chunk may leave; None: none may."""
        if len(self.on_the_way) >= MAX_ON_THE_WAY:
            return None
        free = next((number for number in self.ready if number not in self._has_turns), None)
        if free is not None or not self._order:
            return free
        number = self._order[self._turn]
        return number if number in self.ready else None

    def has_left(self, number: int) -> None:
        """All chunks of a parcel have."""
        del self.ready[number]
        if number in self._has_turns:
            self._turn = (self._turn + 1) % len(self._order)
