"""Steps in a row: the time that one more step adds when it follows at once.

A stream that has done its part of a step goes on with the next one. Only carried edges delay it (an update before the
forward that reads the parameter). So the end of a step and the beginning of the next overlap, and the makespan of one
step is not the time of a step in a row of steps. That is the time that one more step adds::

    stream 0 [ forward 1 ][ backward 1 ][ forward 2 ][ backward 2 ]
    stream 1              [ dW ]   [ dW  update ]    [ dW ]   [ dW  update ]
             |<---- makespan of one ------------->|
                                                  |<-- one more -->|

Lanes of cores are threads, which meet at the end of each step.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.errors import InputError
from hocket.ir import Carried, Costs, Edge, Graph, Machine, Plan
from hocket.simulation.engine import simulate

STEPS = 3


def unrolled(graph: Graph, plan: Plan, costs: Costs, steps: int) -> tuple[Graph, Plan, Costs]:
    """`steps` steps in a row as one graph, its plan and its costs, with the op ``conv`` of step 2 named ``conv@2``.

    Example:
        >>> from hocket.ir import Lane, Op
        >>> graph = Graph((Op("forward"), Op("update")), carried=(Carried("update", "forward"),))
        >>> plan = Plan((Lane("x", ("forward",)), Lane("y", ("update",))))
        >>> unrolled(graph, plan, Costs({}), 2)[0].edges
        (Edge(src='update@0', dst='forward@1', size_bytes=0.0),)
    """
    if steps < 1:
        raise InputError(f"simulate: expected at least one step, got {steps}")
    every = range(steps)
    edges = [Edge(f"{src}@{n}", f"{dst}@{n}", size_bytes) for n in every for src, dst, size_bytes in graph.edges]
    edges += [Edge(f"{src}@{n - 1}", f"{dst}@{n}") for n in every[1:] for src, dst in graph.carried]
    ops = tuple(replace(op, name=f"{op.name}@{n}", reads=(), writes=()) for n in every for op in graph.ops)
    carried = tuple(Carried(f"{src}@{steps - 1}", f"{dst}@0") for src, dst in graph.carried)
    lanes = tuple(replace(lane, ops=tuple(f"{op}@{n}" for n in every for op in lane.ops)) for lane in plan.lanes)
    after = {f"{op}@{n}": tuple(f"{other}@{n}" for other in others) for n in every for op, others in plan.after.items()}
    threads = [lane.ops for lane in plan.lanes if lane.kind == "cores" and lane.ops]
    for n in every[1:]:
        for of_lane in threads:
            meet = tuple(f"{others[-1]}@{n - 1}" for others in threads)
            after[f"{of_lane[0]}@{n}"] = (*after.get(f"{of_lane[0]}@{n}", ()), *meet)
    return (
        Graph(ops, tuple(edges), carried),
        Plan(lanes, after, plan.planner),
        Costs(
            {f"{op}@{n}": row for n in every for op, row in costs.durations_us.items()},
            sources={f"{op}@{n}": source for n in every for op, source in costs.sources.items()},
            note=costs.note,
            shares={f"{op}@{n}": row for n in every for op, row in costs.shares.items()},
        ),
    )


def step_us(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> float:
    """The time of a step of `plan` in a row of `STEPS`, in microseconds: the mean of all but the first."""
    first = simulate(graph, plan, costs, machine).makespan_us
    longer, many, more = unrolled(graph, plan, costs, STEPS)
    return (simulate(longer, many, more, machine).makespan_us - first) / (STEPS - 1)
