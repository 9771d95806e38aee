"""Assumptions changed one at a time: each changes what it says, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.assumptions import (
    LAUNCH_US,
    MKL_DNN,
    VARIANTS,
    Setup,
    best_widths,
    launch,
    only_mkl,
    siblings,
    timeline_of,
)
from benchmarks.curves import for_graph, kind_of
from benchmarks.knl import published_knl
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan
from hocket.planning import plan
from hocket.simulation import simulate

TARGETS = ("aten.convolution", "aten.mm", "aten.relu", "aten.add", "aten.native_batch_norm")
CORES = 8


@st.composite
def setups(draw) -> Setup:
    count = draw(st.integers(1, 8))
    ops = tuple(
        Op(f"op{i}", draw(st.sampled_from(TARGETS)), "forward", flops=draw(st.floats(1e5, 1e8))) for i in range(count)
    )
    pairs = [(ops[i].name, ops[j].name) for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []
    graph = Graph(ops, tuple(Edge(*pair) for pair in edges))
    return Setup(graph, for_graph(graph, published_knl(CORES)), Machine.of(cores=CORES, smt=2))


def recommended_us(setup: Setup) -> float:
    return setup.makespan_us(plan(setup.graph, setup.costs, setup.machine, planner="serial"))


@given(setups())
def test_whatever_is_changed_can_be_planned(setup):
    for variant in VARIANTS:
        changed = variant.change(setup)
        made = plan(changed.graph, changed.costs, changed.machine, planner="concurrency", lookahead_ms=0.0)
        assert changed.makespan_us(made) > 0.0


def test_every_variant_changes_something():
    ops = (Op("a", "aten.relu", "forward", size_bytes=1e6), Op("b", "aten.mm", "forward", flops=1e8))
    graph = Graph(ops, (Edge("a", "b"),))
    setup = Setup(graph, for_graph(graph, published_knl()), Machine.of(cores=68, smt=4))
    assert all(variant.change(setup) != setup for variant in VARIANTS)
    assert siblings(1.03)(setup) == setup


@given(setups(), st.floats(0.0, 50.0))
def test_dispatch_adds_to_every_op_at_every_width(setup, us):
    changed = launch(us)(setup)
    for op, of_op in setup.costs.durations_us.items():
        for width, time_us in of_op.items():
            expected_us = max(1.0, time_us + us - LAUNCH_US)
            assert changed.costs.durations_us[op][width] == pytest.approx(expected_us)


@given(setups(), st.sampled_from([0.5, 2.0]))
def test_best_widths_move_and_convolutions_stay(setup, factor):
    changed = best_widths(factor)(setup)
    for op in setup.graph.ops:
        before, after = (list(one.costs.durations_us[op.name].values()) for one in (setup, changed))
        if kind_of(op) == "Conv2D":
            assert after == before
        else:
            best = before.index(min(before)) + 1
            wanted = min(max(1, round(best * factor)), CORES)
            assert after[0] == pytest.approx(before[0])
            assert all(b <= a for a, b in pairwise(after[:wanted])), "it falls up to there"
            assert all(b >= a for a, b in pairwise(after[wanted - 1 :])), "and rises beyond"


@given(setups())
def test_with_mkl_only_the_recommended_setting_takes_as_long_as_ever(setup):
    changed = only_mkl(setup)
    assert {op.name for op in changed.graph.ops} == {op.name for op in setup.graph.ops if kind_of(op) in MKL_DNN}
    assert recommended_us(changed) == pytest.approx(recommended_us(setup))


def test_with_mkl_only_ops_wait_for_each_other_through_others():
    graph = Graph(
        (
            Op("conv1", "aten.convolution", "forward"),
            Op("relu", "aten.relu", "forward"),
            Op("conv2", "aten.convolution", "forward"),
            Op("beside", "aten.convolution", "forward"),
        ),
        (Edge("conv1", "relu"), Edge("relu", "conv2")),
    )
    costs = Costs({op.name: {str(width): 60.0 / width for width in range(1, CORES + 1)} for op in graph.ops})
    changed = only_mkl(Setup(graph, costs, Machine.of(cores=CORES)))
    assert [tuple(edge[:2]) for edge in changed.graph.edges] == [("conv1", "conv2")]
    assert changed.alone_us == 60.0 / CORES


def disturbed(plan: Plan, beside: float, *edges: Edge) -> dict[str, tuple[float, float]]:
    graph = Graph((Op("a"), Op("b"), Op("c")), edges)
    costs = Costs({"a": {"1": 10.0}, "b": {"1": 4.0}, "c": {"1": 5.0}})
    setup = Setup(graph, costs, Machine.of(cores=2), wait_us=0.0, beside=beside)
    return {span.op: span[2:] for span in timeline_of(setup, plan).spans}


def test_company_costs_as_much_of_an_op_as_has_it():
    side_by_side = Plan(
        (Lane("x", ("a",), cores=(0,)), Lane("y", ("b",), cores=(1,)), Lane("z", ("c",))), {"c": ("a",)}
    )
    assert disturbed(side_by_side, 1.5) == {"a": (0.0, 12.0), "b": (0.0, 6.0), "c": (12.0, 17.0)}
    alone = Plan((Lane("x", ("a", "b", "c")),))
    assert disturbed(alone, 1.5) == disturbed(alone, 1.0) == {"a": (0.0, 10.0), "b": (10.0, 14.0), "c": (14.0, 19.0)}


def test_who_disturbs_nobody_is_simulated_as_ever():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({"a": {"1": 3.0}, "b": {"1": 0.0}})
    made = Plan((Lane("x", ("a",)), Lane("y", ("b",))))
    machine = Machine.of(cores=2)
    assert timeline_of(Setup(graph, costs, machine), made) == simulate(graph, made, costs, machine, 5.0)
    assert timeline_of(Setup(graph, costs, machine, beside=2.0), made).by_op["b"].duration_us == 0.0
