"""`Contention`: who runs beside whom, how fast, and until when; the interface of what by-events simulation asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["CombinedContention", "Contention"]


class Contention(Protocol):
    """Lanes whose ops slow each other down.

    `next_us` is when something may change if nothing begins before; infinity while nothing runs.
    """

    @property
    def next_us(self) -> float: ...

    def __contains__(self, lane: int) -> bool:
        """Whether the ops of this lane are among those."""

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        """An op begins on a lane that is idle; alone it would take `work_us`."""

    def ended(self, now_us: float) -> Sequence[tuple[int, float]]:
        """Ops that have ended by `now_us`, and when each got on at first; they are forgotten.

        To be asked once all that begins at `now_us` has begun, and never later than `next_us`.
        """


class CombinedContention:
    """Several kinds of contention in one plan; a lane has at most one of them."""

    def __init__(self, *parts: Contention) -> None:
        self._parts = parts

    @property
    def next_us(self) -> float:
        return min((part.next_us for part in self._parts), default=float("inf"))

    def __contains__(self, lane: int) -> bool:
        return any(lane in part for part in self._parts)

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        next(part for part in self._parts if lane in part).begin(lane, op, work_us, now_us)

    def ended(self, now_us: float) -> Sequence[tuple[int, float]]:
        return [found for part in self._parts if part.next_us <= now_us for found in part.ended(now_us)]
