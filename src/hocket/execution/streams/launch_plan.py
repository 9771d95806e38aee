"""The launch plan of ops that are launched together: their order, their waits, and when values are dropped.

A whole step is one launch plan. A CUDA graph and the ops outside of it are two, launched one after the other. Each part
derives its own waits and drops, since an order that only holds by way of an op of another part does not hold inside it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hocket.ir import Graph, Op, Plan, Synchronisation, launch_order, synchronisation
from hocket.tracing.program import Program


@dataclass(frozen=True)
class LaunchPlan:
    """Order, waits and drops of one launch."""

    order: tuple[str, ...]  # the ops in launch order
    lane_of: dict[str, int]  # op -> number of its lane in the plan
    sync: Synchronisation  # the waits between them
    last: tuple[str, ...]  # the last op of each lane that takes part
    dropped: dict[str, tuple[int, ...]]  # op -> slots to drop once it has been launched
    late: tuple[int, ...]  # slots to drop when the lanes have joined


def launch_plan_of(program: Program, graph: Graph, plan: Plan, ops: Collection[str] | None = None) -> LaunchPlan:
    """Make the launch plan of `ops`, or of all. Other ops that these wait for have been launched before."""
    if ops is not None:
        chosen = set(ops)
        graph = Graph(
            tuple(Op(op.name, op.target, op.role) for op in graph.ops if op.name in chosen),
            tuple(edge for edge in graph.edges if edge.src in chosen and edge.dst in chosen),
        )
        after = {op: tuple(o for o in others if o in chosen) for op, others in plan.after.items() if op in chosen}
        lanes = tuple(replace(lane, ops=tuple(op for op in lane.ops if op in chosen)) for lane in plan.lanes)
        plan = Plan(lanes, {op: others for op, others in after.items() if others}, plan.planner)
    sync = synchronisation(graph, plan)
    dropped, late = drops(program, sync, plan)
    return LaunchPlan(
        launch_order(graph, plan),
        {op: number for number, lane in enumerate(plan.lanes) for op in lane.ops},
        sync,
        tuple(lane.ops[-1] for lane in plan.lanes if lane.ops),
        dropped,
        late,
    )


def drops(program: Program, sync: Synchronisation, plan: Plan) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Find the op after whose launch each value of these ops is dropped, on the lane that made it and after all uses.

    Slots without such an op come second. They are dropped when the lanes have joined.
    """
    readers = program.readers()
    dropped: dict[str, list[int]] = {}
    late: list[int] = []
    for action in program.actions:
        if action.name not in sync.place:
            continue
        number, position = sync.place[action.name]
        lane = plan.lanes[number].ops
        for slot in action.fills:
            if slot in program.kept:
                continue
            users = [action.name, *(reader for reader in readers.get(slot, ()) if reader in sync.place)]
            op = next((op for op in lane[position:] if all(sync.before(user, op) for user in users)), None)
            if op is None:
                late.append(slot)
            else:
                dropped.setdefault(op, []).append(slot)
    return {op: tuple(slots) for op, slots in dropped.items()}, tuple(late)
