"""The engine against SimPy, an independent one, which the benchmark uses as its baseline."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import run


@settings(max_examples=6)
@given(num_ops=st.integers(1, 60), num_lanes=st.integers(1, 5), seed=st.integers(0, 99))
def test_both_engines_agree(num_ops, num_lanes, seed):
    pytest.importorskip("simpy")
    figures = run(num_ops, num_lanes, repeats=1, seed=seed)  # which compares the makespans
    assert figures["makespan_us"] > 0.0


def test_figures_are_json_and_name_what_was_measured():
    pytest.importorskip("simpy")
    figures = json.loads(json.dumps(run(500, 3, repeats=2)))
    assert set(figures["questions"]) == {"again", "again_spans", "new_plan", "first"}
    for question in figures["questions"].values():
        for summary in question.values():
            assert 0.0 < summary["min"] <= summary["median"] <= summary["max"]
    assert {"python", "simpy", "numpy"} <= set(figures["versions"])
