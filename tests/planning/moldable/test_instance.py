"""From costs to numbers, and from placements to lanes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Op
from hocket.planning.moldable.instance import Placement, as_plan, durations_of, makespan_us
from hocket.planning.moldable.sgs import serial_sgs
from hocket.simulation import simulate
from invariants import illegality, longest_path_us
from strategies import costs_of, decided_cases, graphs, moldable_cases
from support.refusals import refused


@given(data=st.data())
def test_the_table_is_what_costs_say(data):
    graph = data.draw(graphs())
    device = Device("cpu0", cores=data.draw(st.integers(1, 9)))
    costs = data.draw(costs_of(graph, devices=("cpu0", "cpu1")))
    table = durations_of(graph, costs, device)
    for row, op in zip(table, graph.ops, strict=True):
        for width in range(1, device.cores + 1):
            assert row[width] == pytest.approx(costs.duration_us(op.name, width=width, device="cpu0"), rel=1e-12)


def test_an_op_without_a_cost_here_is_named():
    graph = Graph((Op("a"), Op("b")))
    refused("no duration for op 'b'", durations_of, graph, Costs({"a": {"1": 1.0}}), Device("cpu0", cores=2))
    with pytest.raises(InputError, match="op 'b' has no duration for device 'cpu0', only for gpu0"):
        durations_of(graph, Costs({"a": {"1": 1.0}, "b": {"gpu0": 1.0}}), Device("cpu0", cores=2))


@given(case=moldable_cases())
def test_an_instance_is_the_graph_in_numbers(case):
    instance = case.instance
    names = [op.name for op in case.graph.ops]
    for op, name in enumerate(names):
        assert [names[other] for other in instance.predecessors[op]] == list(case.graph.predecessors[name])
        assert [names[other] for other in instance.successors[op]] == list(case.graph.successors[name])
        row = instance.durations_us[op]
        best = instance.best_width[op]
        assert row[best] == min(row[1:])
        assert all(us > row[best] for us in row[1:best]), "the narrowest of equals"
    fastest = {name: min(row[1:]) for name, row in zip(names, instance.durations_us, strict=True)}
    assert max(instance.ranks_us) == pytest.approx(longest_path_us(case.graph, fastest))
    assert max(instance.ranks_at_us(instance.best_width)) == max(instance.ranks_us)


@given(decided_cases())
def test_a_plan_of_placements_is_legal_and_as_short_and_its_widest_lanes_come_first(made):
    case, instance, widths = made
    placed = serial_sgs(instance, widths, instance.order)
    plan = as_plan(case.graph, placed, case.device, "mine", instance.apart)
    check(case.graph, plan, case.machine)
    assert illegality(case.graph, plan, case.machine) is None
    timeline = simulate(case.graph, plan, case.costs, case.machine, instance.wait_us)
    for one in placed:
        span = timeline.by_op[case.graph.ops[one.op].name]
        assert plan.lane_of[span.op].cores == one.cores
        assert span.start_us <= one.start_us * (1 + 1e-9), "no op starts later than it was placed"
    assert timeline.makespan_us <= makespan_us(placed) * (1 + 1e-9)
    assert len({lane.cores for lane in plan.lanes}) == len(plan.lanes)
    assert all(lane.width == len(lane.cores) for lane in plan.lanes)
    assert [lane.width for lane in plan.lanes] == sorted((lane.width for lane in plan.lanes), reverse=True)


def test_turns_and_names_by_hand():
    graph = Graph(tuple(Op(name) for name in "abcde"), (Edge("a", "e"),))
    placed = [
        Placement(0, (0, 1), 0.0, 4.0),
        Placement(1, (0,), 4.0, 6.0),
        Placement(2, (1, 3), 4.0, 5.0),
        Placement(3, (0,), 6.0, 7.0),
        Placement(4, (0, 1), 7.0, 9.0),
    ]
    plan = as_plan(graph, placed, Device("cpu0", cores=4), "mine")
    assert {lane.name: lane.ops for lane in plan.lanes} == {
        "cpu0.0-1": ("a", "e"),
        "cpu0.1+3": ("c",),
        "cpu0.0": ("b", "d"),
    }
    assert plan.after == {"b": ("a",), "c": ("a",), "e": ("d", "c")}
    assert plan.planner == "mine"


def test_ops_that_are_kept_apart_wait_for_each_other():
    graph = Graph((Op("a"), Op("b")))
    placed = [Placement(1, (1,), 0.0, 3.0), Placement(0, (0,), 3.0, 4.0)]
    device = Device("cpu0", cores=2)
    assert as_plan(graph, placed, device, "").after == {}
    assert as_plan(graph, placed, device, "", {0: {1}, 1: {0}}).after == {"a": ("b",)}


def test_placements_that_overlap_are_refused():
    graph = Graph((Op("a"), Op("b")))
    placed = [Placement(0, (0, 1), 0.0, 4.0), Placement(1, (1,), 3.0, 6.0)]
    refused("ops 'a' and 'b' overlap on core 1", as_plan, graph, placed, Device("cpu0", cores=2), "")
