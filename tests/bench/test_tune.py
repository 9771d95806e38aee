"""The bench of whole searches does what it says, in small."""

import json
from dataclasses import replace

import pytest

from benchmarks.cli import main
from benchmarks.tune import CONTENDERS, SEARCHES, simulated
from benchmarks.tune.simulated import SETTINGS
from hocket.search.split import find_split


def test_every_executor_runs_the_same_trials(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SEARCHES, "mlp-32", replace(SEARCHES["mlp-32"], algorithms=("random",)))
    file = tmp_path / "tune.json"
    assert main(["tune", "mlp-32", "--contender", "fused", "--quick", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["complete"]
    rows = found["searches"]["mlp-32 random"]
    assert set(rows) == {"serial", "fused"}
    assert rows["fused"]["fused_models"] == 1
    assert rows["fused"]["side_by_side"] > 1
    assert rows["fused"]["farthest"] < 1e-3
    assert rows["fused"]["ends_differ"] == 0
    assert rows["serial"]["epochs"] == rows["fused"]["epochs"] == 8
    assert "mlp-32 random" in capsys.readouterr().out


def test_short_searches_are_timed_in_turns(tmp_path, capsys):
    file = tmp_path / "short.json"
    assert main(["tune-short", "--trials", "3", "--rounds", "2", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {len(own) for own in found["cpu_s"].values()} == {2}
    assert len(set(found["best"].values())) == 1
    assert found["to_serial"]["serial"] == 1
    assert "3 trials of 8 epochs" in capsys.readouterr().out


def test_unknown_names_are_refused(capsys):
    assert main(["tune", "mlp-33"]) == 1
    assert f"expected some of {', '.join(SEARCHES)}, got 'mlp-33'" in capsys.readouterr().err
    assert main(["tune", "mlp-32", "--contender", "mps"]) == 1
    assert f"expected some of {', '.join(CONTENDERS)}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mlp-32", "digits-cnn", pytest.param("pointnet", marks=pytest.mark.slow)])
def test_the_fusible_parameters_are_the_papers(name):
    base = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "gamma": 0.5, "period": 5}
    own = {"batch_size": 8, "width": 16} if name == "pointnet" else {}
    split = find_split(SEARCHES[name], SEARCHES[name].space(), base | own)
    assert set(split.fusible) == set(base)
    assert set(split.infusible) == set(own)
    assert split.options == {"lr", "betas", "weight_decay"}


def test_the_command_measures_and_simulates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulated, "SIZES", (1, 2))
    monkeypatch.setattr(simulated, "SEARCHES", 1)
    file = tmp_path / "simulated.json"
    assert main(["tune-simulated", "mlp-32", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found["steps_ms"]["mlp-32"]["auto"]) == {"1", "2"}
    assert set(found["searches"]["mlp-32"]) == set(SETTINGS)
    assert "R = 250" in capsys.readouterr().out
