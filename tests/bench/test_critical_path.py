"""The experiment on a simulated P100, in part, and the one on cores, in short."""

import json

import pytest

from benchmarks.critical_path.measured import on_cores
from benchmarks.critical_path.simulated import PAPER, Setting, graph_of, measure
from hocket.ir import Machine

SETTING = Setting(Machine.preset("p100"))


def row(name: str, batch_size: int) -> dict:
    return measure(graph_of(name, batch_size), SETTING, batch_size)


def test_every_method_adds_something_and_nothing_beats_the_bound():
    found = row("lenet", PAPER["lenet"])
    ms = found["ms"]
    assert ms["layers"] > ms["asynchronous"] >= ms["full"] >= found["lower_bound_ms"]
    assert ms["graph"] > ms["kept_graph"] >= ms["full_graph"] >= found["lower_bound_ms"]
    assert found["speedup"]["layers"] == 1.0
    assert found["speedup"]["full"] == pytest.approx(ms["layers"] / ms["full"])
    assert found["peak_ratio"] <= 1.1
    assert 1 < found["streams"] <= 8
    assert found["events"] < found["edges_across"]


@pytest.mark.slow
def test_on_cores_every_contender_has_its_turns_and_peaks_are_measured(monkeypatch):
    monkeypatch.setattr("benchmarks.critical_path.measured.ON_CORES", {"lenet": (16,)})
    found = json.loads(json.dumps(on_cores(quick=True, rounds=1, block=1)))
    (network,) = found["networks"].values()
    assert set(network["median_ms"]) == {"eager", "serial", "concurrency", "critical-path"}
    assert min(network["median_ms"].values()) > 0
    memory = network["memory"]
    assert memory["ratio"] == memory["plan_bytes"] / memory["eager_bytes"]
    assert 0 < memory["predicted_ratio"] <= 1.1
