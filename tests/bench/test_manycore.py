"""The bench on many cores, on a step of milliseconds, and with its assumptions changed one at a time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import manycore
from benchmarks.assumptions import VARIANTS, Setup
from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from hocket.ir import Edge, Graph, Machine, Op
from hocket.planning import plan

TINY = {"mlp": {"width": 16, "depth": 2, "batch_size": 4}}


@pytest.fixture(scope="module")
def result():
    return manycore.run(targets=TINY, cores=(6, 3))


def test_it_is_json_with_its_assumptions_and_the_papers_figures(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))
    assert any("take" in line for line in result["assumptions"])
    assert "not recorded" in result["curves"]
    assert result["paper"]["mean"] == 1.36
    assert list(result["machines"]) == ["6", "3"]


def test_measured_runs_every_plan_beside_eager(monkeypatch):
    """On however many cores there are, for a step too small to mean anything."""
    here = Machine.here()
    if here.cores < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(manycore, "TARGETS", TINY)
    monkeypatch.setattr(manycore, "FEWEST_CORES", 2)
    found = manycore.measured(rounds=1)
    row = found["targets"]["mlp"]
    assert set(row["speedup"]) >= {"eager", "serial", "s1", "s12", "s123", "uniform", "all"}
    assert row["speedup"]["eager"] == 1.0
    assert all(summary["median_ms"] > 0 for summary in row["contenders"].values())
    assert set(row["predicted"]) == set(row["speedup"]) - {"eager"}
    assert found["mean"]["all"] == row["speedup"]["all"]


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
