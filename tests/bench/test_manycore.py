"""The bench on many cores, on a step of milliseconds."""

import json

import pytest

from benchmarks import manycore
from hocket.ir import Machine

TINY = {"mlp": {"width": 16, "depth": 2, "batch_size": 4}}


def test_it_is_json_with_the_papers_figures(monkeypatch):
    monkeypatch.setattr(manycore, "TARGETS", TINY)
    result = manycore.run(cores=(6, 3))
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))
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
    monkeypatch.setattr(manycore, "ROUNDS", 1)
    found = manycore.run(measured=True)
    row = found["targets"]["mlp"]
    assert set(row["speedup"]) >= {"eager", "serial", "s1", "s12", "s123", "uniform", "all"}
    assert row["speedup"]["eager"] == 1.0
    assert all(summary["median_ms"] > 0 for summary in row["contenders"].values())
    assert set(row["predicted"]) == set(row["speedup"]) - {"eager"}
    assert found["mean"]["all"] == row["speedup"]["all"]
