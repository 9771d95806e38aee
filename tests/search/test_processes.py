"""Trials side by side in processes have the values that they have here."""

import multiprocessing
import os
import sys
from dataclasses import replace

import pytest
from tests.search.pieces import BATCHES, LR, SPACE, train
from tests.search.searches import as_serial, random_study, searched
from torch.nn import functional

import forked
from hocket import Halving
from hocket.cli import main
from hocket.errors import InputError


def dies(params):
    if params["lr"] > 0.01 and multiprocessing.parent_process() is not None:  # not in the process of the test
        os._exit(3)
    return train(params)


def test_trials_in_processes_are_as_here(monkeypatch):
    forked.in_place_of_spawn(monkeypatch)  # not in the slow test
    _, record = as_serial(train, SPACE, trials=5, epochs=4, halving=Halving(eta=2), executor="processes", processes=2)
    assert {each.kind for each in record.epochs} == {"processes"}
    assert {each.slot for each in record.epochs} == {0, 1}


@pytest.mark.slow
def test_a_process_that_ends_takes_one_trial_along():
    study = random_study()
    for rate in (0.02, 0.005, 0.02, 0.006):
        study.enqueue_trial({"lr": rate})
    searched(dies, {"lr": LR}, study=study, executor="processes", processes=2, trials=4, epochs=2, fusible=[])
    for trial in study.trials:
        assert trial.state.name == ("FAIL" if trial.params["lr"] > 0.01 else "COMPLETE")
        assert trial.params["lr"] < 0.01 or trial.user_attrs["hocket:error"] == "its process ended with status 3"


def test_a_function_that_cannot_be_imported_is_refused():
    with pytest.raises(InputError, match="executor='processes' needs a function that can be imported"):
        searched(lambda params: train(params), {"lr": LR}, executor="processes", trials=2, epochs=1)


def train_ending(params):
    """The metric is no number from the second epoch on where the rate is large."""
    calls = 0

    def metric(outputs, target):
        nonlocal calls
        calls += 1
        return (
            float("nan") if params["lr"] > 0.01 and calls > len(BATCHES) else functional.cross_entropy(outputs, target)
        )

    return replace(train(params), metric=metric)


def test_a_trial_that_ends_early_leaves_nothing_to_the_next_one_in_its_process(monkeypatch):
    forked.in_place_of_spawn(monkeypatch)
    study, _ = as_serial(train_ending, {"lr": LR}, trials=6, epochs=4, executor="processes", processes=2, fusible=[])
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "FAIL"}


SEARCH = """
import hocket
from optuna.distributions import FloatDistribution
from tests.search.pieces import BATCHES, nn, torch


class Net(nn.Linear):
    pass


def train(params):
    model = Net(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return hocket.Training(model, optimizer, nn.functional.cross_entropy, BATCHES, nn.functional.cross_entropy)


def study():
    return hocket.tune(train, {"lr": FloatDistribution(0.01, 0.1)}, 2, 1, executor="processes", processes=1)
"""


@pytest.mark.parametrize(("name", "status"), [("my_search", 0), ("json", 1)])
def test_the_command_searches_by_a_function_of_a_file(monkeypatch, tmp_path, capsys, name, status):
    forked.in_place_of_spawn(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{name}.py").write_text(SEARCH)
    assert main(["tune", f"{name}.py:study"]) == status
    sys.modules.pop(name if status == 0 else f"hocket_target_{name}")
    said = capsys.readouterr()
    if status == 0:
        assert "2 trials, 2 complete" in said.out
    else:
        assert "executor='processes' cannot import it in a process: ModuleNotFoundError" in said.err
