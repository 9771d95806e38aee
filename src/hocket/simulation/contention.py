"""`Contention`, the interface of resources whose simultaneous ops slow each other down.

`RateSharing` is the common part of a GPU and a network card: each op runs at a rate, and all rates are computed again
when an op begins or ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Protocol


class Contention(Protocol):
    """Lanes whose ops slow each other down.

    `next_us` is the time of the next possible change if no op begins before, infinity while no op runs.
    """

    @property
    def next_us(self) -> float: ...

    def __contains__(self, lane: int) -> bool:
        """Return True if the ops of this lane are among those."""

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        """Begin an op, which alone would take `work_us`, on an idle lane."""

    def ended(self, now_us: float) -> Sequence[tuple[int, float]]:
        """Remove the ops that have ended by `now_us`, and return them with their starts.

        Called after all ops that begin at `now_us`, and never later than `next_us`.
        """


class CombinedContention:
    """Several kinds of contention in one plan, of which each lane has at most one."""

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


class RateSharing(ABC):
    """Contention in which each op runs at a rate that changes only when an op begins or ends."""

    def __init__(self) -> None:
        self.next_us = inf
        self._running: dict[int, _OpAtRate] = {}
        self._is_stale = False  # the rates

    @abstractmethod
    def __contains__(self, lane: int) -> bool: ...

    @abstractmethod
    def _admit(self, lane: int, op: int, now_us: float) -> None:
        """Note an op that begins."""

    @abstractmethod
    def _dismiss(self, ops: Collection[int]) -> None:
        """Forget ops that have ended."""

    @abstractmethod
    def _rates(self, now_us: float) -> Mapping[int, float]:
        """The speed of each op from now on, between 0.0 (stopped) and 1.0 (as fast as alone)."""

    def _next_change_us(self, now_us: float) -> float:
        """The time at which rates change although no op begins or ends."""
        return inf

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        self._running[op] = _OpAtRate(work_us, now_us)
        self._admit(lane, op, now_us)
        self._is_stale = True
        self.next_us = now_us

    def ended(self, now_us: float) -> list[tuple[int, float]]:
        found = [(op, one.started_us) for op, one in self._running.items() if one.end_us <= now_us]
        if found:
            for op, _ in found:
                del self._running[op]
            self._dismiss([op for op, _ in found])
            # Their followers begin at this instant, so the rates are computed after those.
            self._is_stale = True
            self.next_us = now_us
        elif self._is_stale or now_us >= self.next_us:
            self._is_stale = False
            for op, rate in self._rates(now_us).items():
                self._running[op].go_on(rate, now_us)
            ends_us = min((one.end_us for one in self._running.values()), default=inf)
            self.next_us = min(ends_us, self._next_change_us(now_us))
        return found


class _OpAtRate:
    """A running op: its remaining work, its start, and its end at the present rate."""

    def __init__(self, work_us: float, now_us: float) -> None:
        self.started_us = self.end_us = inf
        self._left_us, self._since_us, self._rate = work_us, now_us, 0.0

    def go_on(self, rate: float, now_us: float) -> None:
        """Run at this rate from now on."""
        if rate > 0.0:
            self.started_us = min(self.started_us, now_us)
        if rate != self._rate:
            self._left_us = max(0.0, self._left_us - (now_us - self._since_us) * self._rate)
            self._since_us, self._rate = now_us, rate
            self.end_us = now_us + self._left_us / rate if rate > 0.0 else inf
