"""Strategies 3 and 4 of Liu et al., which run ops side by side.

Strategy 3: whenever cores are idle, take the most expensive ready op that fits into them at one of its candidate widths
(narrowest first) and ends no later than the running ops. If there is none, take the most expensive op that fits, and if
no op runs, the most expensive one.

Strategy 4: while an op takes all cores, small ready ops (the shortest at one thread first) run on the sibling hardware
threads, each on the cores with the least load so far, as long as they end no later than the wide op. The slowdown is
that of `hocket.simulation.smt`: while both threads of a core are busy, both run at the same reduced speed, and the wide
op ends with the slowest of its threads::

    core 0  sibling  |  [ small ][ small ]     |
            thread 0 |=======---------------===|      the small ops of the most loaded core delay the wide op,
    core 1  sibling  |  [   small   ]          |      and those of other cores do not delay it further
            thread 0 |=======---------=====|...|
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from hocket.planning.moldable.core_allocator import CoreAllocator, members
from hocket.planning.moldable.instance import Instance, Placement
from hocket.planning.moldable.sgs import Clock


def corun(
    instance: Instance,
    widths: Sequence[int],
    candidates: Sequence[Sequence[int]],
    smt_speedup: float | None = None,
    in_pairs: bool = False,
) -> list[Placement]:
    """Placements by strategy 3, and by strategy 4 too if `smt_speedup` is given.

    Args:
        instance: the ops.
        widths: the width of each by strategies 1 and 2.
        candidates: the widths that strategy 3 may choose from, ascending.
        smt_speedup: throughput of two threads of a core over that of one (see `hocket.ir.Device`). Times of ops that
            share cores leave wake-ups out.
        in_pairs: where nothing runs, begin the two most expensive ready ops side by side if that ends sooner.
    """
    return _Corun(instance, widths, candidates, smt_speedup, in_pairs).run()


class _Corun:
    def __init__(
        self,
        instance: Instance,
        widths: Sequence[int],
        candidates: Sequence[Sequence[int]],
        smt_speedup: float | None,
        in_pairs: bool,
    ) -> None:
        self._instance = instance
        self._durations = instance.durations_us
        self._widths = widths
        self._candidates = candidates
        self._cost_us = [min(of_op[w] for w in mine) for of_op, mine in zip(self._durations, candidates, strict=True)]
        self._smt_speedup = smt_speedup
        self._in_pairs = in_pairs
        self._clock = Clock(instance)
        self._ready: list[tuple[float, int]] = []  # the most expensive first
        self._are_ready(self._clock.first())

    def run(self) -> list[Placement]:
        clock = self._clock
        now_us = 0.0
        while self._ready or not clock.is_over:
            while self._ready and clock.cores.num_idle:
                chosen = self._next(now_us)
                if chosen is None:
                    break
                op, width = chosen
                del self._ready[bisect_left(self._ready, (-self._cost_us[op], op))]
                clock.start(op, width)
                if self._smt_speedup is not None and width == self._instance.num_cores:
                    self._fill_siblings(clock.placed[-1], self._smt_speedup)
            now_us, found = clock.next(now_us)
            self._are_ready(found)
        return clock.placed

    def _are_ready(self, ops: Iterable[int]) -> None:
        for op in ops:
            insort(self._ready, (-self._cost_us[op], op))

    def _next(self, now_us: float) -> tuple[int, int] | None:
        """The op to start now and its width, or None to wait."""
        clock, durations = self._clock, self._durations
        if not clock.running:
            op = self._ready[0][1]
            return op, self._width_in_a_pair(op) or min(self._candidates[op], key=durations[op].__getitem__)
        left_us = max(end_us for end_us, _ in clock.running) - now_us - self._instance.wait_us
        num_idle = clock.cores.num_idle
        for _, op in self._ready[bisect_left(self._ready, (-left_us, -1)) :]:
            for width in self._candidates[op]:
                if width <= num_idle and durations[op][width] <= left_us and not clock.disturbs(op):
                    return op, width
        for _, op in self._ready:
            fitting = [width for width in self._candidates[op] if width <= num_idle]
            if fitting and not clock.disturbs(op):
                return op, min(fitting, key=durations[op].__getitem__)
        return None

    def _width_in_a_pair(self, op: int) -> int:
        """The width of `op` at which it and the next ready op end sooner side by side than in sequence, or 0."""
        if not self._in_pairs or len(self._ready) < 2:
            return 0
        other = self._ready[1][1]
        if other in self._instance.apart.get(op, frozenset()):
            return 0
        both_us, width = min(
            (
                (max(self._durations[op][one], self._durations[other][two]) + self._instance.wait_us, one)
                for one in self._candidates[op]
                for two in self._candidates[other]
                if one + two <= self._instance.num_cores
            ),
            default=(float("inf"), 0),
        )
        return width if both_us < self._cost_us[op] + self._cost_us[other] else 0

    def _fill_siblings(self, wide: Placement, speedup: float) -> None:
        """Strategy 4, from the start of the `wide` op to its end."""
        num_cores = self._instance.num_cores
        slowdown = 2 / speedup  # of an op that shares its cores
        end_us = [wide.end_us] * num_cores  # the end of the wide op's thread on each core
        siblings = CoreAllocator(num_cores)
        running: list[tuple[float, int, int]] = []  # the end of a small op, the op, and its siblings
        now_us = wide.start_us
        while True:
            for op in sorted((op for _, op in self._ready), key=lambda op: self._durations[op][1]):
                width = self._widths[op]
                small_us = self._durations[op][width]
                near_apart = self._instance.apart.get(op, frozenset())
                if (
                    width > siblings.num_idle
                    or wide.op in near_apart
                    or any(other in near_apart for _, other, _ in running)
                ):
                    continue
                lane = siblings.choose_least(width, end_us)
                cores = members(lane)
                latest_us = min([end_us[core] for core in cores])
                if now_us + small_us > latest_us or now_us >= latest_us:
                    continue
                del self._ready[bisect_left(self._ready, (-self._cost_us[op], op))]
                siblings.take(lane)
                heappush(running, (now_us + small_us * slowdown, op, lane))
                self._clock.beside(op, lane << num_cores, now_us, now_us + small_us * slowdown)
                for core in cores:
                    end_us[core] += small_us * (slowdown - 1)
            if not running:
                break
            now_us, op, lane = heappop(running)
            siblings.give_back(lane, now_us)
            self._are_ready(self._clock.release(op, now_us))
        self._clock.stretch(wide, max(end_us))
