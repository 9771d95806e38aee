"""Streams that share a GPU: against a naive simulation, and worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Lane, Machine, Op, Plan, Share
from hocket.simulation import LAUNCHES, simulate
from invariants import naive_gpu_simulation
from strategies import gpu_cases

GPU = Machine((Device("gpu0", "cuda", 4, priorities=2),))


@given(case=gpu_cases(), launches=st.sampled_from(LAUNCHES))
def test_agrees_with_the_naive_simulator(case, launches):
    timeline = simulate(case.graph, case.plan, case.costs, case.machine, launches=launches)
    naive = naive_gpu_simulation(case.graph, case.plan, case.costs, case.machine, launches)
    for span in timeline.spans:
        assert (span.start_us, span.end_us) == pytest.approx(naive[span.op], rel=1e-6, abs=1e-6)


@given(case=gpu_cases())
def test_no_gpu_does_more_than_it_can(case):
    timeline = simulate(case.graph, case.plan, case.costs, case.machine)
    for device in case.machine.devices:
        for part in (0, 1):
            area_us = sum(
                case.costs.duration_us(op, device=device.name) * case.costs.shares[op][device.name][part]
                for lane in case.plan.lanes
                if lane.device == device.name
                for op in lane.ops
                if op in case.costs.shares
            )
            assert timeline.makespan_us >= area_us * (1 - 1e-9)


def streams(*priorities: int, ops: str = "ab") -> Plan:
    return Plan(tuple(Lane(op, (op,), "stream", "gpu0", priority=p) for op, p in zip(ops, priorities, strict=True)))


def times(
    plan: Plan, shares: dict[str, Share], durations: dict[str, float], edges=()
) -> dict[str, tuple[float, float]]:
    graph = Graph(tuple(Op(op) for op in durations), tuple(Edge(*edge) for edge in edges))
    costs = Costs(
        {op: {"gpu0": us} for op, us in durations.items()}, shares={op: {"gpu0": s} for op, s in shares.items()}
    )
    timeline = simulate(graph, plan, costs, GPU)
    return {span.op: (span.start_us, span.end_us) for span in timeline.spans}


def test_kernels_that_fit_run_side_by_side_and_others_divide():
    assert times(streams(0, 0), {"a": Share(0.5), "b": Share(0.5)}, {"a": 10, "b": 10})["b"] == (0, 10)
    # b asks for 0.8 and gets 0.4 while a runs: 5 of its 10 us are done by then.
    assert times(streams(0, 0), {"a": Share(0.6), "b": Share(0.8)}, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 15)}


def test_bandwidth_runs_out_as_well():
    shares = {"a": Share(0.1, 0.75), "b": Share(0.1, 0.5)}
    assert times(streams(0, 0), shares, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 15)}


def test_priority_decides_and_among_equals_whoever_was_first():
    full = {"a": Share(1.0), "b": Share(1.0)}
    assert times(streams(0, 0), full, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (10, 20)}
    assert times(streams(0, 1), full, {"a": 10, "b": 10}) == {"a": (10, 20), "b": (0, 10)}


def test_a_late_kernel_of_higher_priority_takes_its_part_at_once():
    shares = {"a": Share(1.0), "b": Share(1.0), "c": Share(0.2)}
    found = times(
        Plan((Lane("low", ("a",), "stream", "gpu0"), Lane("high", ("c", "b"), "stream", "gpu0", priority=1))),
        shares,
        {"a": 10.0, "b": 10.0, "c": 5.0},
    )
    assert found["c"] == (0, 5)
    assert found["b"] == (5, 15)
    assert found["a"] == (0, 21)  # 4 of its 10 us beside c, nothing beside b


def test_an_op_without_a_share_is_in_nobodys_way():
    assert times(streams(0, 0), {"a": Share(1.0)}, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 10)}


def test_launches_hold_an_op_back_and_events_delay_it():
    machine = Machine((Device("gpu0", "cuda", 4, launch_us=5.0, graph_launch_us=1.0, event_us=2.0),))
    graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "c"),))
    plan = Plan((Lane("x", ("a", "b"), "stream", "gpu0"), Lane("y", ("c",), "stream", "gpu0")))
    costs = Costs({op: {"gpu0": 3.0} for op in "abc"})

    def starts(launches: str, *outside: str) -> list[float]:
        spans = simulate(graph, plan, costs, machine, launches=launches, outside=outside).by_op
        return [spans[op].start_us for op in "abc"]

    assert starts("free") == [0.0, 3.0, 3.0]
    assert starts("eager") == [5.0, 10.0, 15.0]
    assert starts("graph") == [1.0, 4.0, 6.0]
    assert starts("graph", "b") == [1.0, 6.0, 7.0], "b is launched by itself, and c after it"
    with pytest.raises(InputError, match="expected launches to be one of free, eager, graph, got 'lazy'"):
        simulate(graph, plan, costs, machine, launches="lazy")


def test_lanes_of_cores_are_not_launched():
    machine = Machine((Device("cpu0"), Device("gpu0", "cuda", 4, launch_us=5.0, event_us=2.0)))
    graph = Graph((Op("a"), Op("b")), (Edge("a", "b"),))
    plan = Plan((Lane("x", ("a",)), Lane("y", ("b",), "stream", "gpu0")))
    timeline = simulate(graph, plan, Costs({op: {"1": 9.0} for op in "ab"}), machine, launches="eager")
    assert timeline.by_op["a"].start_us == 0.0
    assert timeline.by_op["b"].start_us == 11.0
