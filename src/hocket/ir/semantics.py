"""The meaning of a plan: the ops it runs, what each waits for, an order in which they can end, and a lane's threads.

Checking, simulation, execution and planning take these from here. The rule is one sentence: each lane runs its ops in
order, and an op starts when its lane has reached it and every op that it depends on has finished::

    waits of e:   its edges        a -> e        (graph.predecessors)
                  added waits      d -> e        (plan.after)
                  its lane         c before e    (the op before it there)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from hocket.errors import PlanError
from hocket.ir.graph import Graph
from hocket.ir.machine import Device
from hocket.ir.plan import Lane, Plan


def check_ops(graph: Graph, plan: Plan) -> None:
    """Return if `plan` runs every op of `graph` and nothing else. A plan by itself runs no op twice."""
    for lane in plan.lanes:
        for op in lane.ops:
            if op not in graph.by_name:
                raise PlanError(
                    f"lane {lane.name!r} runs op {op!r}, which the graph does not have", op=op, lane=lane.name
                )
    for op in graph.by_name:
        if op not in plan.lane_of:
            raise PlanError(f"op {op!r} of the graph is run by no lane", op=op)


def waits_of(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """For each op all that it waits for directly: edges, `Plan.after`, and last the op before it on its lane."""
    waits = {op: [*others, *plan.after.get(op, ())] for op, others in graph.predecessors.items()}
    for lane in plan.lanes:
        for before, op in pairwise(lane.ops):
            waits[op].append(before)
    return waits


def execution_order(graph: Graph, plan: Plan, waits: Mapping[str, Iterable[str]] | None = None) -> tuple[str, ...]:
    """The ops in an order in which each comes after all that it waits for. A `PlanError` names a circle of waits.

    `waits` is the result of `waits_of`, where it is at hand.
    """
    waits = waits_of(graph, plan) if waits is None else waits
    followers: dict[str, list[str]] = {op: [] for op in waits}
    missing: dict[str, int] = {}
    for op, others in waits.items():
        needed = set(others)
        missing[op] = len(needed)
        for other in needed:
            followers[other].append(op)
    order = [op for op, count in missing.items() if not count]
    for done in order:  # grows as it goes
        for op in followers[done]:
            missing[op] -= 1
            if not missing[op]:
                order.append(op)
    if len(order) < len(missing):
        try:
            TopologicalSorter({op: waits[op] for op, count in missing.items() if count}).prepare()
        except CycleError as error:
            raise _deadlock(graph, plan, error.args[1]) from None
    return tuple(order)


def _deadlock(graph: Graph, plan: Plan, circle: Sequence[str]) -> PlanError:
    """The error for ops that wait for each other in a circle, with the reason of each wait.

    Each op of the circle waits for the one before it. The last is the same as the first.
    """
    reasons = []
    for before, op in pairwise(circle):
        if before in graph.predecessors[op]:
            reasons.append(f"op {op!r} depends on {before!r}")
        elif before in plan.after.get(op, ()):
            reasons.append(f"op {op!r} waits for {before!r} by the plan")
        else:
            reasons.append(f"op {op!r} comes after {before!r} on lane {plan.lane_of[op].name!r}")
    return PlanError(f"deadlock: {'; '.join(reasons)}", op=circle[0], lane=plan.lane_of[circle[0]].name)


def hardware_threads(lane: Lane, device: Device) -> tuple[int, ...]:
    """The hardware threads of a pinned lane, where ``core + k * device.cores`` is the k-th further one of a core.

    A lane that names siblings has those that it names. Any other has the first thread of each of its cores, and then
    second ones, until it has as many as it is wide.
    """
    if not lane.cores or names_threads(lane, device):
        return lane.cores
    threads = [core + sibling * device.cores for sibling in range(device.smt) for core in lane.cores]
    return tuple(threads[: max(lane.width, len(lane.cores))])


def names_threads(lane: Lane, device: Device) -> bool:
    """Return True if a lane names hardware threads one by one, among them second ones of a core."""
    return bool(lane.cores) and max(lane.cores) >= device.cores
