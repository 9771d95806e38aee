r"""Stream plans for GPUs with fewer priority levels than a step needs.

A P100 has two levels. TurboDL (section 3.3) needs one for each layer path and each task, and proposes:

1. *Order*: paths that share a level share a queue, whose order replaces the missing levels::

       level 1   [ critical dA ][ critical dA ][ dA of the other path ][ ... ]        one stream in place of two

2. *Waits*: they keep their streams, and an added wait delays the less critical path until the more critical one has
   begun::

       level 1   [ critical dA ][ critical dA ]
                       `-------> [ dA of the other path ]                            two streams, one event more

Both have a cost, as the paper says. So there are two more: *plain*, where paths share a level without further measures,
and *flat*, one level for all streams, for steps whose parameter gradients are the bottleneck. The shortest depends on
the durations, so `hocket.planning.critical_path` simulates all of them and takes the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from hocket.ir import Graph, Lane, Plan, list_order
from hocket.planning.critical_path.streams import Stream, Streams, step_order

METHODS = ("order", "waits", "plain", "flat")


def hardware_levels(wanted: Mapping[Stream, int], num_levels: int) -> dict[Stream, int]:
    """A level of the GPU for each stream, from 0 (lowest) to `num_levels` - 1.

    If there are too few levels, weight and bias gradients share the lowest one, and the other levels go to the most
    critical paths, of which the last ones share a level. With only one level all streams share it.

    Example:
        >>> hardware_levels({("activation", 0): 2, ("activation", 1): 1, ("weight", 0): 0, ("bias", 0): -1}, 2)
        {('activation', 0): 1, ('activation', 1): 1, ('weight', 0): 0, ('bias', 0): 0}
    """
    distinct = sorted(set(wanted.values()))
    if len(distinct) <= num_levels:
        return {stream: distinct.index(priority) for stream, priority in wanted.items()}
    critical = sorted({priority for (task, _), priority in wanted.items() if task == "activation"}, reverse=True)
    lowest = 1 if num_levels > 1 else 0
    return {
        stream: max(num_levels - 1 - critical.index(priority), lowest) if stream[0] == "activation" else 0
        for stream, priority in wanted.items()
    }


def stream_plan(
    graph: Graph, streams: Streams, device: str, num_levels: int, method: str
) -> tuple[Plan, tuple[str, ...]]:
    """The plan on a GPU, and the order of all ops that its lanes keep.

    Args:
        graph: one step.
        streams: the stream of each op.
        device: the GPU.
        num_levels: its number of stream priorities.
        method: one of `METHODS`.
    """
    if method in ("order", "waits"):
        by_rank = step_order(graph, _by_rank(graph, streams), updates_last=streams.updates_last)
        streams = replace(streams, order=by_rank)
    turn = {op: at for at, op in enumerate(streams.order)}
    ops = streams.lanes()
    level = dict.fromkeys(ops, 0)
    if method != "flat":
        level = hardware_levels({stream: streams.priority(stream) for stream in ops}, num_levels)
    queues: dict[Stream, list[Stream]] = {}
    for stream in ops:
        leader = next((other for other in queues if method == "order" and _share(stream, other, level)), stream)
        queues.setdefault(leader, []).append(stream)
    lanes = []
    for leader, members in queues.items():
        queue = sorted((op for stream in members for op in ops[stream]), key=turn.__getitem__)
        name = f"{device}.{leader[0]}{leader[1]}"
        lanes.append(Lane(name, tuple(queue), "stream", device, priority=level[leader]))
    after = _added_waits(streams, level, turn) if method == "waits" else {}
    return Plan(tuple(lanes), after), streams.order


def _share(one: Stream, other: Stream, level: Mapping[Stream, int]) -> bool:
    return one[0] == other[0] == "activation" and level[one] == level[other]


def _by_rank(graph: Graph, streams: Streams) -> list[str]:
    """The backbone block by block, and in each block the more critical path first, as far as edges allow."""
    backbone = streams.backbone.ops
    place = {op: at for at, op in enumerate(backbone)}
    turn = {op: (at, 0) for op, at in place.items()}
    for block, paths in streams.blocks:
        for rank, path in enumerate(paths):
            turn.update(dict.fromkeys((backbone[op] for op in path.ops), (block.ops[0], rank)))
    left = {op: sum(before in place for before in graph.predecessors[op]) for op in backbone}
    followers = {op: [after for after in graph.successors[op] if after in place] for op in backbone}
    return list(list_order(left, followers, lambda op: (turn[op], place[op])))


def _added_waits(streams: Streams, level: Mapping[Stream, int], turn: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Waits between paths of a block that share a level: the first op of one waits for that of the next better one."""
    backbone = streams.backbone.ops
    waits: dict[str, tuple[str, ...]] = {}
    for _, paths in streams.blocks:
        for better, worse in pairwise(paths):
            first, late = backbone[better.ops[0]], backbone[worse.ops[0]]
            one, other = streams.stream_of[first], streams.stream_of[late]
            if one != other and level[one] == level[other] and turn[first] < turn[late]:
                waits[late] = (first,)
    return waits
