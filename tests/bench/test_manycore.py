"""The bench on many cores: that its figures are what they are called, on a step of milliseconds.

Assumptions changed one at a time: each changes what it says, and nothing else.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import manycore
from benchmarks.assumptions import VARIANTS, Setup, siblings
from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from hocket.errors import InputError
from hocket.ir import Costs, Edge, Graph, Machine, Op
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


def test_what_strategies_add_is_what_they_gain(result):
    for machine in result["machines"].values():
        (row,) = machine["targets"].values()
        product = row["added"]["s12"] * row["added"]["s3"] * row["added"]["s4"]
        assert product == pytest.approx(row["speedup"]["s1234"])
        assert machine["mean"] == pytest.approx(row["speedup"]), "of one target"
        assert machine["geomean"] == pytest.approx(row["speedup"])
        assert row["to_bound"] >= 1.0 / 1.03 - 1e-9
        assert row["speedup"]["all"] >= max(row["speedup"]["s1234"], 1.0) * (1 - 1e-9)
        assert row["speedup"]["uniform"] >= 1.0 - 1e-9, "1 x all cores is among what is tried"


def test_ops_that_do_not_scale_gain_what_runs_side_by_side():
    """Four ops of one core each on four cores: four times as fast by strategy 3, not at all without."""
    graph = Graph(tuple(Op(f"op{i}", "aten.relu") for i in range(4)))
    costs = Costs({op.name: {"1": 100.0, "4": 100.0} for op in graph.ops})
    row = manycore.figures(manycore.Setup(graph, costs, Machine.of(cores=4, smt=2)))
    assert row["recommended_ms"] == 0.4
    labels = {"s1": 1.0, "s12": 1.0, "s123": 4.0, "s1234": 4.0, "halves": 4.0, "uniform": 4.0, "all": 4.0}
    assert row["speedup"] == labels
    assert row["added"] == {"s12": 1.0, "s3": 4.0, "s4": 1.0}
    assert row["uniform_best"] == "4x1"
    assert row["to_bound"] == 1.0


def test_quick_leaves_out_large_networks_and_changed_assumptions(monkeypatch):
    captured = []
    monkeypatch.setattr(
        manycore, "_captured", lambda name, size: captured.append(name) or Graph((Op("a", "aten.relu"),))
    )
    found = manycore.run(quick=True)
    assert tuple(captured) == manycore.QUICK
    assert "sensitivity" not in found
    assert list(found["machines"]) == ["68", "16"]


def test_two_cores_are_no_many_cores(monkeypatch):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine.of(cores=2)))
    with pytest.raises(InputError, match="this machine has 2 cores, and with --measured it takes more than 2"):
        manycore.measured()


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


def test_every_variant_changes_something():
    ops = (Op("a", "aten.relu", "forward", size_bytes=1e6), Op("b", "aten.mm", "forward", flops=1e8))
    graph = Graph(ops, (Edge("a", "b"),))
    setup = Setup(graph, for_graph(graph, published_knl()), Machine.of(cores=68, smt=4))
    assert all(variant.change(setup) != setup for variant in VARIANTS)
    assert siblings(1.03)(setup) == setup
