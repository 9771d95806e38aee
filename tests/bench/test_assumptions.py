"""Assumptions changed one at a time: each changes what it says, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.assumptions import VARIANTS, Setup, siblings
from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from hocket.ir import Edge, Graph, Machine, Op
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
