from __future__ import annotations

import pytest
from hypothesis import given

from hocket.checking import check
from hocket.errors import InputError
from hocket.ir import Carried, Costs, Edge, Graph, Lane, Machine, Op, Plan
from hocket.simulation import simulate, step_us, unrolled
from strategies import legal_cases

MACHINE = Machine.of(cores=2)


@given(case=legal_cases())
def test_a_row_of_steps_is_a_plan_that_waits_for_what_is_carried(case):
    graph, plan, costs = unrolled(case.graph, case.plan, case.costs, 3)
    check(graph, plan)
    assert len(graph) == 3 * len(case.graph)
    timeline = simulate(graph, plan, costs, case.machine)
    for src, dst in case.graph.carried:
        for step in (0, 1):
            assert timeline.by_op[f"{src}@{step}"].end_us <= timeline.by_op[f"{dst}@{step + 1}"].start_us
    assert unrolled(case.graph, case.plan, case.costs, 1)[0].edges == tuple(
        Edge(f"{edge.src}@0", f"{edge.dst}@0", edge.size_bytes) for edge in case.graph.edges
    )


def test_the_next_steps_forward_runs_beside_this_ones_weight_gradient():
    graph = Graph(
        (Op("forward"), Op("backward"), Op("weight"), Op("update")),
        (Edge("forward", "backward"), Edge("forward", "weight"), Edge("weight", "update")),
    )
    costs = Costs({op: {"1": 10.0} for op in graph.by_name})
    ops = {"main": ("forward", "backward"), "side": ("weight", "update")}
    plan = Plan(tuple(Lane(name, of_lane, "stream", "gpu0") for name, of_lane in ops.items()))
    assert simulate(graph, plan, costs, MACHINE).makespan_us == 30.0
    assert step_us(graph, plan, costs, MACHINE) == 20.0
    held = Graph(graph.ops, graph.edges, (Carried("update", "forward"),))
    assert step_us(held, plan, costs, MACHINE) == 30.0
    threads = Plan(tuple(Lane(name, of_lane) for name, of_lane in ops.items()))
    assert step_us(graph, threads, costs, MACHINE) == 30.0


def test_too_few_steps():
    graph, plan, costs = Graph((Op("a"),)), Plan((Lane("x", ("a",)),)), Costs({"a": {"1": 1.0}})
    with pytest.raises(InputError, match="expected at least one step, got 0"):
        unrolled(graph, plan, costs, 0)
