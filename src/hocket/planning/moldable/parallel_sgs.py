"""Placing ops whose widths and turns are decided.

`parallel_sgs` is a list scheduler with backfilling: whenever cores are idle, the ready ops are taken in order of
priority, and each that fits starts at once. Where one does not fit, narrower ones may pass it, but only those that end
before it could have started anyway, so that no wide op is starved (Lifka: "The ANL/IBM SP scheduling system", 1995)::

    cores 0  [   a (2 cores)   ][  b  ][     d (2 cores)     ]      d waits for b; c may go before it, e not
          1  [                 ][ c ]  [                     ][  e  ]

An op that waits for another lane starts `wait_us` after that lane is done: that is what waking a thread takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from hocket.planning.moldable.core_allocator import CoreAllocator, members
from hocket.planning.moldable.instance import NOBODY, Instance, Placement

# How many ops that do not fit are passed over at one instant before nobody else is asked.
BACKFILL = 16


class Clock:
    """When an op may start: after what it waits for, on its own lane or on another one.

    Args:
        instance: the ops.
        wait_us: how long a lane takes to notice that another one is done.
        apart: for each op those that it shall not run beside.
    """

    def __init__(self, instance: Instance, wait_us: float, apart: Mapping[int, AbstractSet[int]]) -> None:
        self.cores = CoreAllocator(instance.num_cores, wait_us)
        self.wait_us = wait_us
        self.apart = apart
        self.placed: list[Placement] = []
        self._durations = instance.durations_us
        self._predecessors = instance.predecessors
        self._end_us = [0.0] * len(instance.durations_us)
        self._lane = [0] * len(instance.durations_us)
        self.running: list[tuple[float, int]] = []
        self._instance = instance
        self._later: list[tuple[float, int]] = []  # ops that wait for an arrival only, and when that is

    def start(self, op: int, width: int) -> float:
        """Place `op` on idle cores; when it ends."""
        lanes, ends, wait_us = self._lane, self._end_us, self.wait_us
        before = self._predecessors[op]
        near = [lanes[other] for other in sorted(before, key=ends.__getitem__, reverse=True)] if before else ()
        lane = self.cores.choose(width, near)
        start_us = max(self.cores.take(lane), self._instance.ready_us(op))
        for others in (before, self.apart.get(op, ())):
            for other in others:
                if lanes[other]:
                    end_us = ends[other] if lanes[other] == lane else ends[other] + wait_us
                    if end_us > start_us:
                        start_us = end_us
        end_us = start_us + self._durations[op][width]
        lanes[op], ends[op] = lane, end_us
        heappush(self.running, (end_us, op))
        self.placed.append(Placement(op, members(lane), start_us, end_us))
        return end_us

    def beside(self, op: int, lane: int, start_us: float, end_us: float) -> None:
        """Place `op` on sibling threads, where it takes no core from anybody."""
        self._lane[op], self._end_us[op] = lane, end_us
        self.placed.append(Placement(op, members(lane), start_us, end_us))

    def stretch(self, placement: Placement, end_us: float) -> None:
        """The op of `placement`, all that is running, ends at another time."""
        self._end_us[placement.op] = end_us
        self.running[:] = [(end_us, placement.op)]
        self.placed[self.placed.index(placement)] = placement._replace(end_us=end_us)

    def arrives(self, op: int, now_us: float) -> bool:
        """Whether `op`, which waits for no other op any more, waits for an arrival; `arrived` will name it then."""
        at_us = self._instance.ready_us(op)
        if at_us > now_us:
            heappush(self._later, (at_us, op))
        return at_us > now_us

    def arrived(self, now_us: float) -> list[int]:
        """The ops whose arrivals are there by now."""
        found = []
        while self._later and self._later[0][0] <= now_us:
            found.append(heappop(self._later)[1])
        return found

    @property
    def is_over(self) -> bool:
        """Whether nothing is running and nothing will arrive."""
        return not self.running and not self._later

    def next(self, now_us: float) -> tuple[float, list[int]]:
        """When the next op ends or can start, and all that have ended then."""
        running = self.running
        if self._later and (not running or self._later[0][0] < running[0][0]):
            return max(now_us, self._later[0][0]), []
        now_us = max(now_us, running[0][0])
        ended = []
        while running and running[0][0] <= now_us:
            end_us, op = heappop(running)
            self.cores.give_back(self._lane[op], end_us)
            ended.append(op)
        return now_us, ended

    def disturbs(self, op: int) -> bool:
        """Whether something runs that `op` shall not run beside."""
        others = self.apart.get(op, frozenset())
        return any(other in others for _, other in self.running)

    def when_idle(self, width: int) -> float:
        """When `width` cores will be idle."""
        more = width - self.cores.num_idle
        for end_us, op in sorted(self.running):
            if more <= 0:
                return end_us
            more -= self._lane[op].bit_count()
            if more <= 0:
                return end_us
        return float("inf")


def parallel_sgs(
    instance: Instance,
    widths: Sequence[int],
    priority: Sequence[float],
    *,
    wait_us: float = 0.0,
    apart: Mapping[int, AbstractSet[int]] = NOBODY,
    latest_us: Sequence[float] | None = None,
) -> list[Placement]:
    """Start ready ops as soon as their width fits, the highest `priority` first.

    Args:
        instance: the ops.
        widths: of each op.
        priority: of each op.
        wait_us: how long a lane takes to notice that another one is done.
        apart: for each op those that it shall not run beside.
        latest_us: for each op when it has to start at the latest; if one cannot, give up.

    Returns:
        The placements, in the order in which the ops were started; after giving up, fewer than there are ops.
    """
    durations, successors = instance.durations_us, instance.successors
    waiting = [len(before) for before in instance.predecessors]
    clock = Clock(instance, wait_us, apart)
    ready = [(-priority[op], op) for op in instance.order if not waiting[op] and not clock.arrives(op, 0.0)]
    heapify(ready)
    cores = clock.cores
    now_us = 0.0
    while ready or not clock.is_over:
        passed: list[tuple[float, int]] = []
        limit_us = float("inf")
        while ready and cores.num_idle and len(passed) < BACKFILL:
            entry = heappop(ready)
            op = entry[1]
            width = widths[op]
            if apart and clock.disturbs(op):
                passed.append(entry)
            elif width <= cores.num_idle and now_us + durations[op][width] <= limit_us:
                clock.start(op, width)
                if latest_us is not None and clock.placed[-1].start_us > latest_us[op]:
                    return clock.placed
            else:
                passed.append(entry)
                if limit_us == float("inf"):
                    limit_us = clock.when_idle(width)
        for entry in passed:
            heappush(ready, entry)
        now_us, ended = clock.next(now_us)
        for op in ended:
            for after in successors[op]:
                waiting[after] -= 1
                if not waiting[after] and not clock.arrives(after, now_us):
                    heappush(ready, (-priority[after], after))
        for op in clock.arrived(now_us):
            heappush(ready, (-priority[op], op))
    return clock.placed
