"""The bench of whole searches does what it says, in small.

Simulated searches decide as real ones do.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.cli import main
from benchmarks.tune import CONTENDERS, SEARCHES
from benchmarks.tune.simulated import SETTINGS, interpolated, simulated
from hocket.search.split import find_split


def test_every_executor_runs_the_same_trials(tmp_path, capsys):
    file = tmp_path / "tune.json"
    chosen = ["--contender", "fused", "--algorithm", "random"]
    assert main(["tune", "mlp-32", *chosen, "--quick", "-o", str(file)]) == 0
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
    assert main(["tune-short", "--trials", "3", "--repeats", "2", "-o", str(file)]) == 0
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


def test_a_search_in_one_group_takes_the_epochs_of_its_brackets():
    sizes = simulated(SETTINGS["R = 250, eta = 5, skip 1, one group"])
    assert sum(sizes) == (125 * 2 + 25 * 8 + 5 * 40) + (34 * 10 + 6 * 40) + 10 * 50 + 4 * 250
    assert len(sizes) >= 250
    assert sizes[-1] == 4


def test_groups_share_the_trials():
    whole = simulated(SETTINGS["R = 250, eta = 5, skip 1, one group"])
    split = simulated(SETTINGS["R = 250, eta = 5, skip 1"])
    assert sum(split) == sum(whole)
    assert len(split) > len(whole)


def test_as_many_epochs_as_the_measured_search():
    assert sum(simulated(SETTINGS["R = 81, eta = 3, one group"])) == 1581


def test_steps_are_interpolated():
    assert interpolated({1: 1.0, 4: 2.5, 8: 3.0}, 3) == pytest.approx(2.0)
    assert interpolated({1: 1.0, 4: 2.5}, 8) == 5.0


def test_the_command_measures_and_simulates(tmp_path, capsys):
    file = tmp_path / "simulated.json"
    assert main(["tune-simulated", "mlp-32", "--models", "2", "--searches", "1", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found["steps_ms"]["mlp-32"]["auto"]) == {"1", "2"}
    assert set(found["searches"]["mlp-32"]) == set(SETTINGS)
    assert "R = 250" in capsys.readouterr().out
