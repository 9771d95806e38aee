"""Assumptions changed one at a time: each changes what it says, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.assumptions import (
    MKL_DNN,
    VARIANTS,
    Setup,
    only_mkl,
    siblings,
    timeline_of,
)
from benchmarks.curves import for_graph, kind_of
from benchmarks.knl import published_knl
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan
from hocket.planning import plan

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


@given(setups())
def test_with_mkl_only_the_recommended_setting_takes_as_long_as_ever(setup):
    changed = only_mkl(setup)
    assert {op.name for op in changed.graph.ops} == {op.name for op in setup.graph.ops if kind_of(op) in MKL_DNN}
    assert recommended_us(changed) == pytest.approx(recommended_us(setup))


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
