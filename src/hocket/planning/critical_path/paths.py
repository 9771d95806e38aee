r"""Layer paths: the paths through a block, the longest one first.

TurboDL ranks the paths from a block's fork to its merge by the sum of their activation gradients' times. The longest is
the block's critical path (Algorithm 1)::

            ,-- 5 --- 4 --.           1st: 9, 2nd: 7, 3rd: 6. An op on several paths belongs to the longest of them
    fork --<-- 3 -- 4 --- >-- merge
            `---- 6 ------'

Taken literally, that is a sorted list of all paths. But a block in which every op precedes every later one has
exponentially many paths, so `ranked_paths` finds the same result without a list. The longest path through an op
consists of the longest path to it, the op, and the longest path from it, and both follow from the neighbours (dynamic
programming). In the sorted list, the first path that contains an op is the longest one through it. So the next layer
path is the longest path through any op that has none yet, without the ops that have one::

    longest path through each op:    5: 9    4: 9    3: 7    4: 7    6: 6

Times are whole nanoseconds, so that sums are exact and equal paths are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.planning.critical_path.backbone import Backbone
from hocket.planning.critical_path.blocks import Block


@dataclass(frozen=True)
class Path:
    """A path through a block: its length, and those of its ops that are on no longer path, in topological order."""

    length_ns: int
    ops: tuple[int, ...]


def in_ns(durations_us: Sequence[float]) -> list[int]:
    """Durations in whole nanoseconds."""
    return [round(us * 1000) for us in durations_us]


def ranked_paths(backbone: Backbone, block: Block, durations_ns: Sequence[int]) -> list[Path]:
    """The paths of a block, the most critical first, where each op is on one of them."""
    inside = set(block.ops)
    above = {op: [other for other in backbone.above[op] if other in inside] for op in block.ops}
    below = {op: [other for other in backbone.below[op] if other in inside] for op in block.ops}
    up, down = dict.fromkeys(block.ops, 0), dict.fromkeys(block.ops, 0)
    for op in block.ops:
        up[op] = max([up[other] + durations_ns[other] for other in above[op]], default=0)
    for op in reversed(block.ops):
        down[op] = max([down[other] + durations_ns[other] for other in below[op]], default=0)
    through = {op: up[op] + durations_ns[op] + down[op] for op in block.ops}
    left = dict.fromkeys(block.ops)
    paths = []
    for op in sorted(block.ops, key=lambda op: (-through[op], op)):
        if op not in left:
            continue
        way = [op]
        while above[way[-1]]:
            way.append(next(other for other in above[way[-1]] if up[other] + durations_ns[other] == up[way[-1]]))
        way.reverse()
        while below[way[-1]]:
            way.append(next(other for other in below[way[-1]] if down[other] + durations_ns[other] == down[way[-1]]))
        mine = tuple(other for other in way if other in left)
        for other in mine:
            del left[other]
        paths.append(Path(through[op], mine))
    return paths
