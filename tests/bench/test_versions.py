"""Another version's steps against this one's; here, this one's against its own."""

from pathlib import Path

import pytest

import hocket
from benchmarks import versions
from hocket.errors import InputError

SOURCES = Path(hocket.__file__).parents[1]


@pytest.mark.slow
def test_fused_steps_of_two_versions_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(versions, "STEPS_IN_A_ROW", 2)
    saved = []
    found = versions.run(SOURCES, ("mlp-32:2",), 2, saved.append)
    row = found["targets"]["mlp-32:2"]
    assert row["ratio"] == row["other"]["step_ms"] / row["this"]["step_ms"]
    assert found["geometric_mean"] == pytest.approx(row["ratio"])
    assert 0 < row["low"] <= row["high"]
    assert row["this"]["verdict"] == row["other"]["verdict"] == "fused"
    assert "at a time" in row["this"]["why"]
    assert row["this"]["eager_ms"] > 0
    assert saved == [{"targets": found["targets"]}]


@pytest.mark.slow
def test_searches_of_two_versions_are_timed_in_turns():
    row = versions.measure(SOURCES, "search-mlp-32:3", 1)
    assert row["this"]["verdict"] == row["other"]["verdict"] == "searched"
    assert float(row["this"]["why"]) == pytest.approx(float(row["other"]["why"]), rel=1e-3)
    assert row["low"] <= row["high"]


@pytest.mark.parametrize("target", ["mlp-32:many", "dcgan:2"])
def test_what_cannot_be_fused_here_is_refused(target):
    with pytest.raises(InputError, match="expected a target with one model and a number"):
        versions.measure(SOURCES, target, 1)
