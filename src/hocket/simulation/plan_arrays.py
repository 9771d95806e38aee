"""A plan on its graph as arrays of integers, for the loops of the engine.

Ops are numbered in the order of the graph, so that the part that depends on the graph alone is computed once for all
plans. An op waits for the op before it on its lane and for its dependencies on other lanes, a number of maxima that
differs between ops and would need an inner loop. Instead every op becomes one or more *steps* of exactly two waits
each, and the whole simulation is one line, ``end[step] = max(end[left], end[right]) + work``::

    op d waits for c, which is before it on its lane, and for a and b on other lanes:

    lane ..---[ c ]--.
                      max(c, a) + 0 = step 1 --.
              [ a ]--'                          max(step 1, b) + duration(d) = step 2
                                   [ b ]-------'

Dependencies within a lane are left out: the lane itself enforces them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hocket.ir import Graph, Plan, check_ops, execution_order

_Ints = npt.NDArray[np.int64]
_Result = TypeVar("_Result")


def remember(make: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the results of `make` for as long as its arguments live.

    Arguments are the same if they are the same objects: they never change, and to hash or compare two graphs of 100,000
    ops would take longer than the work it saves. A result must not refer to the arguments, which would keep them alive.
    """
    found: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], _Result]] = {}

    def remembering(*nouns: Any) -> _Result:
        key = tuple(map(id, nouns))
        entry = found.get(key)
        if entry is None:
            result = make(*nouns)
            found[key] = entry = [weakref.ref(noun, lambda _: found.pop(key, None)) for noun in nouns], result
        return entry[1]

    return remembering


class Followers(NamedTuple):
    """The ops that depend on each op: ``after[begin[op]:begin[op + 1]]``."""

    begin: list[int]  # for each op the position of its first follower in `after`
    after: list[int]  # the followers of all ops
    waits: list[int]  # for each op the number of ops that it depends on


class Steps(NamedTuple):
    """The two slots that each step waits for, where slot 0 is time 0 and slot ``s + 1`` the end of step s."""

    left: list[int]  # for each step the first slot
    right: list[int]  # for each step the second
    last: _Ints  # for each op its last step, the one that takes time
    last_left: _Ints  # for each op the first slot of that step
    last_right: _Ints  # for each op the second


@dataclass(frozen=True)
class PlanArrays:
    """The arrays of a plan of n ops."""

    position: _Ints  # the positions of the ops in the graph, in the order of the plan, lane after lane
    lane: _Ints  # for each op the position of its lane
    before: _Ints  # for each op the op before it on its lane, -1 for a lane's first
    src: _Ints  # the op that is waited for, for each dependency: edges of the graph and `Plan.after`
    dst: _Ints  # the op that waits, in the same order, with all dependencies of an op side by side
    followers: Followers  # the same, by the op that is waited for
    order: _Ints  # the ops in an order in which each comes after all that it waits for

    def __len__(self) -> int:
        return len(self.lane)

    @cached_property
    def steps(self) -> Steps:
        """The ops as steps of two waits each."""
        elsewhere = self.lane[self.src] != self.lane[self.dst]
        src, dst = self.src[elsewhere], self.dst[elsewhere]
        waits = np.bincount(dst, minlength=len(self))
        length = np.maximum(waits, 1)
        last = np.empty(len(self), np.int64)
        last[self.order] = np.cumsum(length[self.order]) - 1
        first = last - length + 1
        slot = np.append(last + 1, 0)  # slot[-1]: what the first op of a lane waits for
        left = np.arange(int(length.sum()))
        left[first] = slot[self.before]
        right = np.zeros_like(left)
        groups = waits[waits > 0]  # how many dependencies stand side by side; they are not sorted, only grouped
        nth = np.arange(len(dst)) - np.repeat(np.cumsum(groups) - groups, groups)
        right[first[dst] + nth] = slot[src]
        return Steps(left.tolist(), right.tolist(), last, left[last], right[last])


@dataclass(frozen=True)
class _Dependencies:
    """A graph's edges by the position of their ops, grouped by `dst` in the graph's order."""

    src: _Ints  # the ops waited for
    dst: _Ints  # the ops that wait, ascending
    rank: _Ints  # the place of each op in `Graph.order`

    @cached_property
    def followers(self) -> Followers:
        return _followers(len(self.rank), self.src, self.dst)


@remember
def _dependencies(graph: Graph) -> _Dependencies:
    predecessors = graph.predecessors.values()
    number = graph.index.__getitem__
    lengths = np.fromiter(map(len, predecessors), np.int64, len(graph))
    src = np.fromiter(map(number, chain.from_iterable(predecessors)), np.int64, int(lengths.sum()))
    dst = np.repeat(np.arange(len(graph)), lengths)
    rank = np.arange(len(graph))
    if (src > dst).any():
        rank[np.fromiter(map(number, graph.order), np.int64, len(graph))] = np.arange(len(graph))
    return _Dependencies(src, dst, rank)


@remember
def plan_arrays(graph: Graph, plan: Plan) -> PlanArrays:
    """The arrays of `plan` on `graph`. Other ops, or lanes that wait in a circle, are a `PlanError`."""
    position, lane, before, following = _places(graph, plan)
    known = _dependencies(graph)
    src, dst, rank = known.src, known.dst, known.rank
    if plan.after:
        number = graph.index
        more = [(number[other], number[op]) for op, others in plan.after.items() for other in others]
        src = np.append(src, [other for other, _ in more])
        dst = np.append(dst, [op for _, op in more])
        grouped = np.argsort(dst, kind="stable")
        src, dst = src[grouped], dst[grouped]
    followers = _followers(len(graph), src, dst) if plan.after else known.followers
    has_before = np.flatnonzero(before >= 0)
    if (rank[before[has_before]] < rank[has_before]).all() and (rank[src] < rank[dst]).all():
        order = np.empty_like(rank)
        order[rank] = np.arange(len(graph))  # the plan keeps the graph's own order, so that order will do
    else:
        order = _order(followers, following, (before >= 0).tolist())
    if len(order) < len(graph):
        execution_order(graph, plan)  # names the circle
    return PlanArrays(position, lane, before, src, dst, followers, order)


def _places(graph: Graph, plan: Plan) -> tuple[_Ints, _Ints, _Ints, list[int]]:
    """The positions of the plan's ops in the graph, and for each op its lane and its two neighbours there."""
    lengths = np.array([len(lane.ops) for lane in plan.lanes], np.int64)
    count = int(lengths.sum())
    names = chain.from_iterable(lane.ops for lane in plan.lanes)
    try:
        position = np.fromiter(map(graph.index.__getitem__, names), np.int64, count)
    except KeyError:
        count = -1
    if count < len(graph):
        check_ops(graph, plan)  # says which op is missing or unknown
    lane = np.empty(count, np.int64)
    lane[position] = np.repeat(np.arange(len(lengths)), lengths)
    before = np.full(count, -1)
    following = np.full(count, -1)
    same_lane = lane[position[1:]] == lane[position[:-1]]
    before[position[1:][same_lane]] = position[:-1][same_lane]
    following[position[:-1][same_lane]] = position[1:][same_lane]
    return position, lane, before, following.tolist()


def _followers(count: int, src: _Ints, dst: _Ints) -> Followers:
    begin = np.append(0, np.cumsum(np.bincount(src, minlength=count)))
    after = dst[np.argsort(src, kind="stable")]
    return Followers(begin.tolist(), after.tolist(), np.bincount(dst, minlength=count).tolist())


def _order(followers: Followers, following: list[int], has_before: list[bool]) -> _Ints:
    """The ops in an order in which each comes after all that it waits for, without those on circles."""
    begin, after, waits = followers
    waiting = list(map(int.__add__, waits, has_before))
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
        follower = following[op]
        if follower >= 0:
            left = waiting[follower] - 1
            waiting[follower] = left
            if not left:
                ready.append(follower)
    return np.array(order, np.int64)
