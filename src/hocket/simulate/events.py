"""Simulation by events, for links on which transfers have to queue.

Where a link lets k transfers run side by side and more than k lanes use it, who goes first depends on who was ready
first, so time has to be walked instant by instant. Within one instant everything that needs no such link starts, and
ends if it takes no time; only then are the links handed out: to who has waited longest, and among equals to the lane
that stands first in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from hocket.simulate.program import Program

__all__ = ["by_events"]


def by_events(
    program: Program, durations_us: Sequence[float], link_of: Sequence[int], channels: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """When each op starts and ends.

    Args:
        program: the plan.
        durations_us: how long each op takes, in the order of the graph.
        link_of: for each lane the number of the link it has to queue for; -1: none.
        channels: for each of these links how many transfers fit side by side.
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
    running: list[tuple[float, int]] = []
    ready = [op for op, count in enumerate(waiting) if count == 0]
    now_us = 0.0

    def run(op: int) -> None:
        start_us[op] = now_us
        end_us[op] = now_us + durations_us[op]
        heappush(running, (end_us[op], op))

    while True:
        for op in ready:
            link = link_of[lane[op]]
            if link < 0:
                run(op)
            else:
                heappush(queues[link], (now_us, lane[op], op))
                changed.add(link)
        ready.clear()
        if changed and not (running and running[0][0] <= now_us):
            for link in changed:
                queue = queues[link]
                while queue and free[link]:
                    free[link] -= 1
                    run(heappop(queue)[2])
            changed.clear()
        if not running:
            return np.array(start_us), np.array(end_us)
        now_us, op = heappop(running)
        link = link_of[lane[op]]
        if link >= 0:
            free[link] += 1
            changed.add(link)
        for follower in (*after[begin[op] : begin[op + 1]], *following.get(op, ())):
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
