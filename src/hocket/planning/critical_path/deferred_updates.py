r"""Late side work: what the next step needs last is put off into the next step's forward.

A backward that leaves little of a GPU idle cannot hide all weight gradients; some are left when it ends. In the order
in which they become ready, these are the ones of the first layers, and the next forward begins with just these layers.
By dependency distance, the ready one that is needed first goes first, and what is left is what the next forward needs
last, so it runs beside that::

    ready      backbone   [  backward   ][ f1 ][ f2 ][ f3 ]        distance   [  backward   ][ f1 ][ f2 ][ f3 ]
    first      side        [ dW3 ][ dW2 ][ dW1 ]                   first       [ dW3 ][ dW1 ][ dW2 ]
                                          f1 waits for dW1                                    f2 waits for dW2, and fits

That helps only where a step runs into the next one, so not where each step is a CUDA graph of its own. When ops are
ready, and how fast a lane gets on beside the others at each time, is read off a simulation of the plan as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from heapq import heappop, heappush

from hocket.ir import Graph, Plan, Span, Timeline

__all__ = ["deferred_updates"]


def deferred_updates(
    graph: Graph,
    plan: Plan,
    side: Set[str],
    timeline: Timeline,
    durations_us: Mapping[str, float],
    distance: Mapping[str, float],
) -> tuple[Plan, Sequence[str]]:
    """`plan` with the side ops of each lane in another order, and an order of all ops that its lanes keep.

    Args:
        graph: one step.
        plan: lanes of side ops alone get another order, lanes with other ops keep theirs.
        side: ops that no other op of the step waits for, but side ops.
        timeline: of the plan, simulated.
        durations_us: what each op takes alone.
        distance: dependency distance of each op.
    """
    spans = timeline.by_op
    place = {op: at for at, op in enumerate(graph.order)}
    mine = [lane for lane in plan.lanes if lane.ops and side >= set(lane.ops)]
    side = {op for lane in mine for op in lane.ops}
    end_us = {op: span.end_us for op, span in spans.items() if op not in side}
    start_us = {op: span.start_us for op, span in spans.items() if op not in side}
    paces = {lane.name: _Pace([(spans[op], durations_us[op]) for op in lane.ops]) for lane in mine}
    of = {op: lane.name for lane in mine for op in lane.ops}
    waiting = {op: sum(before not in end_us for before in graph.predecessors[op]) for op in of}
    free_us = dict.fromkeys(paces, 0.0)
    coming: dict[str, list[tuple[float, int, str]]] = {name: [] for name in paces}  # by when they are ready
    able: dict[str, list[tuple[float, int, str]]] = {name: [] for name in paces}  # ready, by distance
    queues: dict[str, list[str]] = {name: [] for name in paces}

    def tell(op: str) -> None:
        ready_us = max([end_us[before] for before in graph.predecessors[op]], default=0.0)
        heappush(coming[of[op]], (ready_us, place[op], op))

    for op, count in waiting.items():
        if not count:
            tell(op)
    while True:
        starts = {
            name: max(free_us[name], 0.0 if able[name] else coming[name][0][0])
            for name in paces
            if able[name] or coming[name]
        }
        if not starts:
            break
        name = min(starts, key=starts.__getitem__)
        while coming[name] and coming[name][0][0] <= starts[name]:
            _, _, op = heappop(coming[name])
            heappush(able[name], (distance[op], place[op], op))
        _, _, op = heappop(able[name])
        start_us[op] = starts[name]
        free_us[name] = end_us[op] = paces[name].after(starts[name], durations_us[op])
        queues[name].append(op)
        for after in graph.successors[op]:
            if after in waiting:
                waiting[after] -= 1
                if not waiting[after]:
                    tell(after)
    lanes = tuple(replace(lane, ops=tuple(queues[lane.name])) if lane.name in queues else lane for lane in plan.lanes)
    # Where times are equal the backbone goes first, and then whoever comes first on a lane.
    turn = {op: at for lane in lanes for at, op in enumerate(lane.ops)}
    order = sorted(start_us, key=lambda op: (start_us[op], op in side, turn[op]))
    return replace(plan, lanes=lanes), order


class _Pace:
    """How fast a lane gets on at each time: the part of its own speed that the ops it ran had there."""

    def __init__(self, ran: Sequence[tuple[Span, float]]) -> None:
        self._until_us = [span.end_us for span, _ in ran]
        self._rates = [
            alone_us / span.duration_us if span.duration_us > alone_us > 0 else 1.0 for span, alone_us in ran
        ]

    def after(self, start_us: float, alone_us: float) -> float:
        """When an op ends that starts then and takes so long alone."""
        now_us, left_us = start_us, alone_us
        for at in range(bisect_right(self._until_us, now_us), len(self._until_us)):
            done_us = (self._until_us[at] - now_us) * self._rates[at]
            if done_us >= left_us:
                return now_us + left_us / self._rates[at]
            left_us -= done_us
            now_us = self._until_us[at]
        return now_us + left_us
