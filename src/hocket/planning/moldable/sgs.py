"""Placement of ops of given widths by priorities or in a given order: the two schedule generation schemes.

`parallel_sgs` is a list scheduler with backfilling: whenever cores are idle, the ready ops are taken in order of
priority, and each that fits starts at once. If one does not fit, narrower ones may pass it, but only those that end
before it could have started, so that no wide op starves (Lifka: "The ANL/IBM SP scheduling system", 1995)::

    cores 0  [   a (2 cores)   ][  b  ][     d (2 cores)     ]      d waits for b, and c may pass it but not e
          1  [                 ][ c ]  [                     ][  e  ]

An op that waits for another lane starts `Instance.wait_us` after that lane is done, the time to wake a thread.

`serial_sgs` places ops in a given order: each starts as soon as its cores and its predecessors allow. For every set of
widths some order gives the shortest placements: that of their starts. So a search over orders and widths can find the
optimum. A search over priorities may miss it: no priority leads to a plan that leaves a core idle although a ready op
would fit.

Allocation of cores to ops, preferably those of an existing lane.

Each set of cores that ops run on becomes a lane, and each lane a thread with its team. So an op goes, in this order, to

1. the lane of an op that it waits for: no other lane has to be woken, and its inputs are in the caches there.
2. a lane of its width that is idle.
3. an idle block of its width among the halves, quarters and so on of the device (Knowlton: "A fast storage allocator",
   1965, the buddy system), preferably one whose other half is taken, so that wide blocks stay whole. Blocks of other
   widths are counted from the last core, or from the first if they take more than half of the cores::

       cores  0 1 2 3 4 5 6 7       width 4: [0-3] [4-7]   width 2: [0-1] [2-3] [4-5] [6-7]   width 3: [5-7] [2-4]

4. the shortest idle block that is long enough, or else any idle cores.

Sets of cores are integers here, with bit c for core c, so that a few operations find a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from hocket.planning.moldable.instance import Instance, Placement

# Ready ops that do not fit are passed over, at most this number at one instant.
BACKFILL = 16


class Clock:
    """Place ops as time passes, each after the ops that it waits for, on the same lane or on another one."""

    def __init__(self, instance: Instance) -> None:
        count = len(instance.durations_us)
        self.cores = CoreAllocator(instance.num_cores, instance.wait_us)
        self.placed: list[Placement] = []
        self.running: list[tuple[float, int]] = []  # a heap: when an op ends, and which
        self._instance = instance
        self._waiting = [len(before) for before in instance.predecessors]
        self._end_us = [0.0] * count
        self._lane = [0] * count
        self._later: list[tuple[float, int]] = []  # a heap: when an op can start that waits only for an arrival

    def first(self) -> list[int]:
        """Ops that can start at once."""
        return [op for op in self._instance.order if not self._waiting[op] and self._has_arrived(op, 0.0)]

    def start(self, op: int, width: int) -> float:
        """Place `op` on idle cores and return its end."""
        instance, lanes, ends = self._instance, self._lane, self._end_us
        before = instance.predecessors[op]
        near = [lanes[other] for other in sorted(before, key=ends.__getitem__, reverse=True)] if before else ()
        lane = self.cores.choose(width, near)
        start_us = max(self.cores.take(lane), instance.ready_us(op))
        for others in (before, instance.apart.get(op, ())):
            for other in others:
                if lanes[other]:
                    end_us = ends[other] if lanes[other] == lane else ends[other] + instance.wait_us
                    if end_us > start_us:
                        start_us = end_us
        end_us = start_us + instance.durations_us[op][width]
        lanes[op], ends[op] = lane, end_us
        heappush(self.running, (end_us, op))
        self.placed.append(Placement(op, members(lane), start_us, end_us))
        return end_us

    def beside(self, op: int, lane: int, start_us: float, end_us: float) -> None:
        """Place `op` on sibling threads, which take no core from other ops."""
        self._lane[op], self._end_us[op] = lane, end_us
        self.placed.append(Placement(op, members(lane), start_us, end_us))

    def stretch(self, placement: Placement, end_us: float) -> None:
        """Move the end of the only running op."""
        self._end_us[placement.op] = end_us
        self.running[:] = [(end_us, placement.op)]
        self.placed[self.placed.index(placement)] = placement._replace(end_us=end_us)

    @property
    def is_over(self) -> bool:
        """True if nothing is running and nothing will arrive."""
        return not self.running and not self._later

    def next(self, now_us: float) -> tuple[float, list[int]]:
        """The time at which an op ends or arrives next, and the ops that can start from then on."""
        running, later = self.running, self._later
        found: list[int] = []
        if later and (not running or later[0][0] < running[0][0]):
            now_us = max(now_us, later[0][0])
        else:
            now_us = max(now_us, running[0][0])
            while running and running[0][0] <= now_us:
                end_us, op = heappop(running)
                self.cores.give_back(self._lane[op], end_us)
                found += self.release(op, now_us)
        while later and later[0][0] <= now_us:
            found.append(heappop(later)[1])
        return now_us, found

    def release(self, op: int, now_us: float) -> list[int]:
        """Ops that can start now that `op` has ended."""
        found = []
        for after in self._instance.successors[op]:
            self._waiting[after] -= 1
            if not self._waiting[after] and self._has_arrived(after, now_us):
                found.append(after)
        return found

    def _has_arrived(self, op: int, now_us: float) -> bool:
        """True if `op` can start by its earliest start. Otherwise `next` returns it when it can."""
        at_us = self._instance.ready_us(op)
        if at_us > now_us:
            heappush(self._later, (at_us, op))
        return at_us <= now_us

    def disturbs(self, op: int) -> bool:
        """True if a running op may not run beside `op`."""
        others = self._instance.apart.get(op, frozenset())
        return any(other in others for _, other in self.running)

    def when_idle(self, width: int) -> float:
        """The time at which `width` cores will be idle."""
        more = width - self.cores.num_idle
        for end_us, op in sorted(self.running):
            more -= self._lane[op].bit_count()
            if more <= 0:
                return end_us
        return float("inf")


def parallel_sgs(
    instance: Instance, widths: Sequence[int], priority: Sequence[float], latest_us: Sequence[float] | None = None
) -> list[Placement]:
    """Start ready ops as soon as their width fits, the highest `priority` first, and return them in this order.

    Placing ends at the first op that starts after its `latest_us`. The placements are then fewer than the ops.
    """
    durations = instance.durations_us
    clock = Clock(instance)
    ready = [(-priority[op], op) for op in clock.first()]
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
            if instance.apart and clock.disturbs(op):
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
        now_us, found = clock.next(now_us)
        for op in found:
            heappush(ready, (-priority[op], op))
    return clock.placed


def serial_sgs(instance: Instance, widths: Sequence[int], order: Sequence[int]) -> list[Placement]:
    """Placements of the ops in `order`, which respects every edge.

    An op takes the lane of a predecessor or another known lane if that is idle when the op can start, or else the cores
    that have been idle for the shortest time.
    """
    num_cores, wait_us = instance.num_cores, instance.wait_us
    free_us = [0.0] * num_cores  # the time from which each core is idle
    used_by: list[tuple[int, ...]] = [()] * num_cores
    lanes: dict[int, list[tuple[int, ...]]] = {}
    placed: dict[int, Placement] = {}
    for op in order:
        width = widths[op]
        waits = [placed[other] for other in instance.predecessors[op]]
        waits += [placed[other] for other in instance.apart.get(op, ()) if other in placed]
        ready_us = max([other.end_us for other in waits], default=0.0)
        ready_us = max(ready_us, instance.ready_us(op))
        ready_us = max(ready_us, sorted(free_us)[width - 1])
        known = lanes.setdefault(width, [])
        near = [other.cores for other in sorted(waits, key=lambda p: -p.end_us) if len(other.cores) == width]
        for cores in (*near, *known):
            if all(free_us[core] <= ready_us for core in cores):
                break
        else:
            idle = [core for core in range(num_cores) if free_us[core] <= ready_us]
            cores = tuple(sorted(sorted(idle, key=lambda core: -free_us[core])[:width]))
            known.append(cores)
        start_us = instance.ready_us(op)
        for other in waits:
            start_us = max(start_us, other.end_us if other.cores == cores else other.end_us + wait_us)
        for core in cores:
            if used_by[core]:
                start_us = max(start_us, free_us[core] if used_by[core] == cores else free_us[core] + wait_us)
        end_us = start_us + instance.durations_us[op][width]
        placed[op] = Placement(op, cores, start_us, end_us)
        for core in cores:
            free_us[core], used_by[core] = end_us, cores
    return list(placed.values())


class CoreAllocator:
    """The cores of a device while ops are placed."""

    def __init__(self, num_cores: int, wait_us: float = 0.0) -> None:
        self.num_cores = self.num_idle = num_cores
        self._wait_us = wait_us
        self._idle = (1 << num_cores) - 1
        # Idle cores, the time at which they were given back, and the lane.
        self._freed: list[tuple[int, float, int]] = []
        self._lanes: dict[int, list[int]] = {}  # by width

    def choose(self, width: int, near: Iterable[int] = ()) -> int:
        """Choose `width` of the idle cores, preferably one of the lanes `near`."""
        idle = self._idle
        for lane in near:
            if lane & idle == lane and lane.bit_count() == width:
                return lane
        known = self._lanes.setdefault(width, [])
        for lane in known:
            if lane & idle == lane:
                return lane
        found = self._block(width)
        known.append(found)
        return found

    def choose_least(self, width: int, value: Sequence[float]) -> int:
        """Choose `width` of the idle cores: the block with the least maximum of `value`, if a block is idle."""
        best, best_value = 0, math.inf
        for block, _ in _grid(self.num_cores, width):
            if block & self._idle == block:
                largest = max([value[core] for core in members(block)])
                if largest < best_value:
                    best, best_value = block, largest
        return best or _best_fit(self._idle, width)

    def take(self, lane: int) -> float:
        """Take these idle cores, and return the time from which they may be used, wake-up included."""
        self._idle &= ~lane
        self.num_idle -= lane.bit_count()
        start_us = 0.0
        kept = []
        for freed in self._freed:
            cores, at_us, by = freed
            if cores & lane:
                if by != lane:
                    at_us += self._wait_us
                if at_us > start_us:
                    start_us = at_us
                cores &= ~lane
                if cores:
                    kept.append((cores, freed[1], by))
            else:
                kept.append(freed)
        self._freed = kept
        return start_us

    def give_back(self, lane: int, at_us: float) -> None:
        """`lane` is idle from `at_us` on."""
        self._idle |= lane
        self.num_idle += lane.bit_count()
        self._freed.append((lane, at_us, lane))

    def _block(self, width: int) -> int:
        """An idle block of the grid, preferably one whose other half is in use, or else any idle cores."""
        idle, found = self._idle, 0
        for block, parent in _grid(self.num_cores, width):
            if block & idle == block:
                if parent & idle != parent:
                    return block
                found = found or block
        return found or _best_fit(idle, width)


@lru_cache(maxsize=4096)
def _grid(num_cores: int, width: int) -> tuple[tuple[int, int], ...]:
    """The blocks for a lane of this width, each with the block that it is a half of."""
    halves = [(0, num_cores)]
    parents = [(0, num_cores)]
    while halves[0][1] > width:
        parents = [half for half in halves for _ in range(2)]
        halves = [
            (begin, length // 2) if left else (begin + length - length // 2, length // 2)
            for begin, length in halves
            for left in (True, False)
        ]
    if halves[0][1] != width:  # no half of a half has this width
        halves = [(begin, width) for begin in range(num_cores - width, -1, -width)]
        if 2 * width > num_cores:
            halves = [(0, width)]
        parents = halves
    return tuple(
        (((1 << length) - 1) << begin, ((1 << outer) - 1) << first)
        for (begin, length), (first, outer) in zip(halves, parents, strict=True)
    )


def _best_fit(idle: int, width: int) -> int:
    """The beginning of the shortest run of idle cores that is long enough, or idle cores from many runs."""
    best, best_length = 0, 1 << 30
    rest, begin = idle, 0
    while rest:
        gap = (rest & -rest).bit_length() - 1
        rest >>= gap
        begin += gap
        length = (~rest & (rest + 1)).bit_length() - 1
        if width <= length < best_length:
            best, best_length = begin, length
        rest >>= length
        begin += length
    if best_length < 1 << 30:
        return ((1 << width) - 1) << best
    found = 0
    for _ in range(width):
        found |= idle & -idle
        idle &= idle - 1
    return found


@lru_cache(maxsize=4096)
def members(lane: int) -> tuple[int, ...]:
    """The cores of a set."""
    return tuple(core for core in range(lane.bit_length()) if lane >> core & 1)
