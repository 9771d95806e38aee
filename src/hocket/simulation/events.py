"""Simulation by events, for plans in which ops queue for a link or slow each other down.

If a link carries k transfers side by side and more than k lanes use it, the transfer that was ready first goes first,
so the simulation proceeds instant by instant. Within one instant all ops that need no such link start, and end if they
take no time. After that the channels of links go to the transfers that have waited longest, and among equals to the
first lane of the plan.

If lanes share cores through sibling hardware threads, or streams a GPU, an op's end moves whenever another one starts
or ends beside it. A `hocket.simulation.contention.Contention` then gives the next end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from hocket.simulation.contention import Contention
from hocket.simulation.plan_arrays import PlanArrays


def by_events(
    arrays: PlanArrays,
    durations_us: Sequence[float],
    link_of: Sequence[int],
    channels: Sequence[int],
    waits_us: Sequence[float],
    sharing: Contention | None = None,
    released_us: Sequence[float] | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The start and end of each op.

    Args:
        arrays: the plan.
        durations_us: of each op, in the order of the graph.
        link_of: for each lane the number of the link that it has to queue for, -1 for none.
        channels: the number of channels of each of these links.
        waits_us: for each lane the delay after an op of another lane has ended.
        sharing: the lanes that slow each other down.
        released_us: the time before which each op may not start.
    """
    begin, after, waits = arrays.followers
    lane = arrays.lane.tolist()
    before = arrays.before.tolist()
    following = {other: (op,) for op, other in enumerate(before)}
    waiting = [count + (other >= 0) for count, other in zip(waits, before, strict=True)]
    start_us = [0.0] * len(arrays)
    end_us = [0.0] * len(arrays)
    free = list(channels)
    queues: list[list[tuple[float, int, int]]] = [[] for _ in channels]
    changed: set[int] = set()  # links that may have both a free channel and a queue
    # Future events as (time, op): the end of an op or, for numbers beyond the last op, the end of one of its waits.
    events: list[tuple[float, int]] = []
    for op, at_us in enumerate(released_us or ()):
        if at_us > 0:
            waiting[op] += 1
            events.append((at_us, len(arrays) + op))
    heapify(events)
    ready = [op for op, count in enumerate(waiting) if count == 0]
    now_us = 0.0

    def run(op: int) -> None:
        start_us[op] = now_us
        if sharing is not None and lane[op] in sharing:
            sharing.begin(lane[op], op, durations_us[op], now_us)
        else:
            heappush(events, (now_us + durations_us[op], op))

    def told(op: int) -> None:
        waiting[op] -= 1
        if not waiting[op]:
            ready.append(op)

    def ended(op: int) -> None:
        end_us[op] = now_us
        link = link_of[lane[op]]
        if link >= 0:
            free[link] += 1
            changed.add(link)
        for follower in after[begin[op] : begin[op + 1]]:
            wait_us = waits_us[lane[follower]] if lane[follower] != lane[op] else 0.0
            if wait_us:
                heappush(events, (now_us + wait_us, len(arrays) + follower))
            else:
                told(follower)
        for follower in following.get(op, ()):
            told(follower)

    while True:
        for op in ready:
            link = link_of[lane[op]]
            if link < 0:
                run(op)
            else:
                heappush(queues[link], (now_us, lane[op], op))
                changed.add(link)
        ready.clear()
        next_us = min(events[0][0] if events else math.inf, sharing.next_us if sharing is not None else math.inf)
        if changed and next_us > now_us:
            for link in changed:
                queue = queues[link]
                while queue and free[link]:
                    free[link] -= 1
                    run(heappop(queue)[2])
            changed.clear()
            continue
        if next_us == math.inf:
            return np.array(start_us), np.array(end_us)
        now_us = next_us
        if not events or events[0][0] > now_us:
            # All other events of this instant are done.
            assert sharing is not None
            for op, started_us in sharing.ended(now_us):
                start_us[op] = started_us
                ended(op)
            continue
        _, op = heappop(events)
        if op >= len(arrays):
            told(op - len(arrays))
        else:
            ended(op)
