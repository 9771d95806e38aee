"""Allocation of cores to ops, preferably those of an existing lane.

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


class CoreAllocator:
    """The cores of a device while ops are placed.

    Attributes:
        num_idle: the number of idle cores.
    """

    def __init__(self, num_cores: int, wait_us: float = 0.0) -> None:
        self.num_cores = self.num_idle = num_cores
        self._wait_us = wait_us
        self._idle = (1 << num_cores) - 1
        self._freed: list[
            tuple[int, float, int]
        ] = []  # idle cores, the time at which they were given back, and the lane
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
