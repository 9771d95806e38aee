"""A plan on its graph as arrays of whole numbers, which the engine can walk without a name in sight.

Ops are counted lane after lane, in the order of the plan. An op waits for the op before it on its lane and for the
ops it depends on elsewhere; so many maxima would need a loop inside the loop. Instead every op becomes one or more
*steps* of exactly two waits each, and the whole simulation is one line::

    op d waits for its lane (c) and for a, b:      lane ..---[ c ]--+---.
                                                                  max(c, a) = step 1, takes nothing
    step 1 = max(end[c], end[a]) + 0                    [ a ]-------'   |
    step 2 = max(end[1], end[b]) + duration(d)          [ b ]----- max(1, b) --[ d ]--

Dependencies within a lane are left out: the lane itself enforces them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.errors import PlanError
from hocket.ir import Graph, Plan
from hocket.simulate.memory import remember

__all__ = ["Program", "Steps", "compiled"]

_Ints = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """What each step waits for, as two slots; slot 0 is the start of time, slot ``s + 1`` the end of step s.

    Attributes:
        left: for each step the first slot.
        right: for each step the second.
        last: for each op its last step, the one that takes time.
        last_left: for each op the first slot of that step.
        last_right: for each op the second.
    """

    left: list[int]
    right: list[int]
    last: _Ints
    last_left: _Ints
    last_right: _Ints


@dataclass(frozen=True)
class Program:
    """A plan of n ops; the arrays of n elements follow the plan's order, lane after lane.

    Attributes:
        position: where each op stands in the graph.
        lane: position of each op's lane.
        before: number of the op before it on its lane; -1 for a lane's first.
        src: the ops waited for, one element for each dependency: edges of the graph and `Plan.after`.
        dst: the op that waits, in the same order.
        order: the ops in an order in which each comes after all it waits for.
    """

    position: _Ints
    lane: _Ints
    before: _Ints
    src: _Ints
    dst: _Ints
    order: _Ints

    def __len__(self) -> int:
        return len(self.lane)

    @cached_property
    def steps(self) -> Steps:
        """The ops as steps of two waits each."""
        count = len(self)
        elsewhere = self.lane[self.src] != self.lane[self.dst]
        src, dst = self.src[elsewhere], self.dst[elsewhere]
        when = np.empty(count, np.int64)
        when[self.order] = np.arange(count)
        by_time = np.argsort(when[dst], kind="stable")
        src, dst = src[by_time], dst[by_time]
        waits = np.bincount(dst, minlength=count)
        length = np.maximum(waits, 1)
        last = np.empty(count, np.int64)
        last[self.order] = np.cumsum(length[self.order]) - 1
        first = last - length + 1
        # The dependencies of one op stand side by side now: number them within their op.
        begins = np.cumsum(waits[self.order]) - waits[self.order]
        nth = np.arange(len(dst)) - begins[when[dst]]
        slot = np.append(last + 1, 0)  # slot[-1]: what the first op of a lane waits for
        left = np.arange(int(length.sum()))
        left[first] = slot[self.before]
        right = np.zeros_like(left)
        right[first[dst] + nth] = slot[src]
        return Steps(left.tolist(), right.tolist(), last, left[last], right[last])

    @cached_property
    def followers(self) -> tuple[list[int], list[int], list[int]]:
        """``after[begin[op]:begin[op + 1]]`` wait for `op`, by lane or dependency; and how many each op waits for."""
        return _followers(len(self), self.before, self.src, self.dst)


@dataclass(frozen=True)
class _GraphArrays:
    """A graph's edges by the position of their ops, and each op's rank in `Graph.order`."""

    src: _Ints
    dst: _Ints
    rank: _Ints


@remember
def _arrays(graph: Graph) -> _GraphArrays:
    predecessors = graph.predecessors.values()
    number = graph.index.__getitem__
    lengths = np.fromiter(map(len, predecessors), np.int64, len(graph))
    src = np.fromiter(map(number, chain.from_iterable(predecessors)), np.int64, int(lengths.sum()))
    rank = np.empty(len(graph), np.int64)
    rank[np.fromiter(map(number, graph.order), np.int64, len(graph))] = np.arange(len(graph))
    return _GraphArrays(src, np.repeat(np.arange(len(graph)), lengths), rank)


@remember
def compiled(graph: Graph, plan: Plan) -> Program:
    """The program of `plan` on `graph`.

    Raises:
        PlanError: an op that the graph does not have, an op of the graph on no lane, or lanes that wait for each
            other in a circle (named op by op).
    """
    position, lane, before = _places(graph, plan)
    arrays = _arrays(graph)
    count = len(position)
    place = np.empty(count, np.int64)
    place[position] = np.arange(count)
    src, dst = place[arrays.src], place[arrays.dst]
    if plan.after:
        pairs = [
            (place[graph.index[other]], place[graph.index[op]]) for op, others in plan.after.items() for other in others
        ]
        more = np.array(pairs, np.int64)
        src, dst = np.concatenate((src, more[:, 0])), np.concatenate((dst, more[:, 1]))
    rank = arrays.rank[position]
    follows = before >= 0
    if (rank[before[follows]] < rank[follows]).all() and (rank[src] < rank[dst]).all():
        order = np.empty(count, np.int64)  # the plan keeps the graph's own order, so that order will do
        order[rank] = np.arange(count)
    else:
        order = _order(*_followers(count, before, src, dst))
    if len(order) < count:
        raise _deadlock(graph, plan)
    return Program(position, lane, before, src, dst, order)


def _places(graph: Graph, plan: Plan) -> tuple[_Ints, _Ints, _Ints]:
    """Each op's position in the graph, its lane, and the op before it on its lane."""
    lengths = np.array([len(lane.ops) for lane in plan.lanes], np.int64)
    count = int(lengths.sum())
    names = chain.from_iterable(lane.ops for lane in plan.lanes)
    try:
        position = np.fromiter(map(graph.index.__getitem__, names), np.int64, count)
    except KeyError as error:
        op = error.args[0]
        lane = plan.lane_of[op].name
        raise PlanError(f"lane {lane!r} runs op {op!r}, which the graph does not have", op=op, lane=lane) from None
    if count < len(graph):
        op = next(op.name for op in graph.ops if op.name not in plan.lane_of)
        raise PlanError(f"op {op!r} of the graph is run by no lane", op=op)
    before = np.arange(-1, count - 1)
    before[(np.cumsum(lengths) - lengths)[lengths > 0]] = -1
    return position, np.repeat(np.arange(len(lengths)), lengths), before


def _followers(count: int, before: _Ints, src: _Ints, dst: _Ints) -> tuple[list[int], list[int], list[int]]:
    follows = before >= 0
    src = np.concatenate((before[follows], src))
    dst = np.concatenate((np.flatnonzero(follows), dst))
    begin = np.concatenate(([0], np.cumsum(np.bincount(src, minlength=count))))
    after = dst[np.argsort(src, kind="stable")]
    return begin.tolist(), after.tolist(), np.bincount(dst, minlength=count).tolist()


def _order(begin: list[int], after: list[int], waiting: list[int]) -> _Ints:
    """The ops so that each comes after all it waits for; those that wait in a circle are left out."""
    waiting = waiting.copy()
    order = []
    ready = [op for op, count in enumerate(waiting) if count == 0]
    while ready:
        op = ready.pop()
        order.append(op)
        for follower in after[begin[op] : begin[op + 1]]:
            left = waiting[follower] - 1
            waiting[follower] = left
            if not left:
                ready.append(follower)
    return np.array(order, np.int64)


def _deadlock(graph: Graph, plan: Plan) -> PlanError:
    """The circle in which ops wait for each other, with the reason for each of its steps."""
    waits = {op: [*others, *plan.after.get(op, ())] for op, others in graph.predecessors.items()}
    for lane in plan.lanes:
        for before, op in pairwise(lane.ops):
            waits[op].append(before)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = error.args[1]  # each op waits for the one before it; it ends with the op it began with
        reasons = []
        for before, op in pairwise(circle):
            if before in graph.predecessors[op]:
                reasons.append(f"op {op!r} depends on {before!r}")
            elif before in plan.after.get(op, ()):
                reasons.append(f"op {op!r} is told to wait for {before!r}")
            else:
                reasons.append(f"op {op!r} comes after {before!r} on lane {plan.lane_of[op].name!r}")
        return PlanError(f"deadlock: {'; '.join(reasons)}", op=circle[0], lane=plan.lane_of[circle[0]].name)
    raise AssertionError("ops were left without an order, yet none waits in a circle")
