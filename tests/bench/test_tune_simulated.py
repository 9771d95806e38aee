"""Simulated searches decide as real ones do."""

from __future__ import annotations

import json

import pytest

from benchmarks.cli import main
from benchmarks.tune.simulated import SETTINGS, interpolated, simulated


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
