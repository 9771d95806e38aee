"""Simulation by events, for what one pass cannot know: who goes first on a link, and who slows whom down on a core.

Where a link lets k transfers run side by side and more than k lanes use it, who goes first depends on who was ready
first, so time has to be walked instant by instant. Within one instant everything that needs no such link starts, and
ends if it takes no time; only then are the links handed out: to who has waited longest, and among equals to the lane
that stands first in the plan.

Where lanes share cores through sibling hardware threads (`hocket.simulate.sharing`) or streams a GPU
(`hocket.simulate.multiprocessors`), an op's speed changes whenever another one starts or ends beside it: what is left
of it is then done at the new speed. It starts when it first gets on at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
import numpy.typing as npt

from hocket.simulate.multiprocessors import Contention
from hocket.simulate.program import Program

__all__ = ["by_events"]


def by_events(
    program: Program,
    durations_us: Sequence[float],
    link_of: Sequence[int],
    channels: Sequence[int],
    waits_us: Sequence[float],
    sharing: Contention | None = None,
    released_us: Sequence[float] | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """When each op starts and ends.

    Args:
        program: the plan.
        durations_us: how long each op takes, in the order of the graph.
        link_of: for each lane the number of the link it has to queue for; -1: none.
        channels: for each of these links how many transfers fit side by side.
        waits_us: for each lane how long it takes to notice that an op of another lane has ended.
        sharing: the lanes that slow each other down.
        released_us: for each op before when it may not start.
    """
    begin, after, waits = program.followers
    lane = program.lane.tolist()
    before = program.before.tolist()
    following = {other: (op,) for op, other in enumerate(before)}
    waiting = [count + (other >= 0) for count, other in zip(waits, before, strict=True)]
    start_us = [0.0] * len(program)
    end_us = [0.0] * len(program)
    free = list(channels)
    queues: list[list[tuple[float, int, int]]] = [[] for _ in channels]
    changed: set[int] = set()  # links that may have both a free channel and a queue
    # What happens next: at which time, and to which op; ops beyond the last are told of an end on another lane.
    events: list[tuple[float, int]] = []
    pace = _Pace(durations_us, start_us, end_us, events)
    for op, at_us in enumerate(released_us or ()):
        if at_us > 0:
            waiting[op] += 1
            events.append((at_us, len(program) + op))
    heapify(events)
    ready = [op for op, count in enumerate(waiting) if count == 0]
    now_us = 0.0

    def run(op: int) -> None:
        start_us[op] = now_us
        end_us[op] = now_us + durations_us[op]
        heappush(events, (end_us[op], op))
        if sharing is not None and lane[op] in sharing:
            sharing.begin(lane[op], op, now_us)
            pace.begin(op, now_us)

    def told(op: int) -> None:
        waiting[op] -= 1
        if not waiting[op]:
            ready.append(op)

    while True:
        for op in ready:
            link = link_of[lane[op]]
            if link < 0:
                run(op)
            else:
                heappush(queues[link], (now_us, lane[op], op))
                changed.add(link)
        ready.clear()
        pace.forget_outdated()
        if sharing is not None and pace.disturbed and not (events and events[0][0] <= now_us):
            pace.change(sharing.rates(), now_us)  # once everything that begins or ends at this instant has done so
            pace.forget_outdated()
        if changed and not (events and events[0][0] <= now_us):
            for link in changed:
                queue = queues[link]
                while queue and free[link]:
                    free[link] -= 1
                    run(heappop(queue)[2])
            changed.clear()
        if not events:
            return np.array(start_us), np.array(end_us)
        now_us, op = heappop(events)
        if op >= len(program):
            told(op - len(program))
            continue
        link = link_of[lane[op]]
        if link >= 0:
            free[link] += 1
            changed.add(link)
        if sharing is not None and lane[op] in sharing:
            sharing.end(lane[op])
            pace.end(op)
        for follower in after[begin[op] : begin[op + 1]]:
            if lane[follower] != lane[op] and waits_us[lane[follower]]:
                heappush(events, (now_us + waits_us[lane[follower]], len(program) + follower))
            else:
                told(follower)
        for follower in following.get(op, ()):
            told(follower)


class _Pace:
    """Ops whose speed may change while they run: what is left of them, and when they end at their present speed.

    `disturbed` says that an op has begun or ended since speeds were last looked at.
    """

    def __init__(
        self,
        durations_us: Sequence[float],
        start_us: list[float],
        end_us: list[float],
        events: list[tuple[float, int]],
    ) -> None:
        self._durations_us = durations_us
        self._start_us = start_us
        self._end_us = end_us
        self._events = events
        self._left: dict[int, tuple[float, float, float]] = {}  # op -> work left, since when, at which speed
        self._still: set[int] = set()  # ready, but not yet getting on
        self._ended: set[int] = set()
        self.disturbed = False

    def begin(self, op: int, now_us: float) -> None:
        self._left[op] = (self._durations_us[op], now_us, 1.0)
        self._still.add(op)
        self.disturbed = True

    def end(self, op: int) -> None:
        del self._left[op]
        self._ended.add(op)
        self.disturbed = True

    def change(self, rates: dict[int, float], now_us: float) -> None:
        self.disturbed = False
        for op, rate in rates.items():
            left_us, since_us, old_rate = self._left[op]
            if rate > 0.0 and op in self._still:
                self._still.discard(op)
                self._start_us[op] = now_us
            if rate != old_rate:
                left_us = max(0.0, left_us - (now_us - since_us) * old_rate)
                self._left[op] = (left_us, now_us, rate)
                if rate > 0.0:
                    self._end_us[op] = now_us + left_us / rate
                    heappush(self._events, (self._end_us[op], op))
                else:
                    self._end_us[op] = inf

    def forget_outdated(self) -> None:
        """Drop ends that came to be wrong when a speed changed."""
        events, end_us = self._events, self._end_us
        while events and events[0][1] < len(end_us):
            at_us, op = events[0]
            if at_us == end_us[op] and op not in self._ended:
                return
            heappop(events)
