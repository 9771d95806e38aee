"""Optuna's studies: whose trials, which direction, what is enqueued, who stops it, and what goes wrong."""

import io
import sqlite3
import sys
from dataclasses import replace

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from tests.search.pieces import BATCHES, LR, SPACE, accuracy, train, train_normed
from tests.search.searches import as_serial, random_study, searched, values

import hocket
from hocket import Halving, Training
from hocket.errors import ExecutionError, InputError, MissingDependencyError
from hocket.search.group import probe
from hocket.search.search import LiveTable, lines
from support.refusals import refused


def test_the_study_of_a_user_is_gone_on_with():
    study = random_study(direction="maximize")
    space = {"lr": LR, "momentum": FloatDistribution(0, 0.9), "factor": FloatDistribution(0.1, 0.9)}
    found = hocket.tune(train_normed, space, 9, 3, study=study, halving=Halving(eta=3))
    assert found is study
    first = {number: own[1] for number, own in values(study).items()}
    best = sorted(first, key=lambda number: -first[number])[:3]
    assert sorted(number for number, own in values(study).items() if len(own) == 3) == sorted(best)
    assert study.best_value == max(study.trials[number].value for number in best)


def test_enqueued_trials_run_first_duplicates_too():
    study = random_study()
    chosen = {"lr": 0.02, "step": 2, "width": 8}
    study.enqueue_trial(chosen)
    study.enqueue_trial(chosen)
    study.enqueue_trial({"lr": 0.03})
    hocket.tune(train, SPACE, 4, 2, study=study)
    assert [trial.params for trial in study.trials[:2]] == [chosen, chosen]
    assert values(study)[0] == pytest.approx(values(study)[1], rel=1e-12)
    assert study.trials[2].params["lr"] == 0.03
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}


def test_callbacks_see_each_trial_and_may_stop_the_search():
    seen = []

    def stop(study, trial):
        seen.append(trial.number)
        if len(seen) == 3:
            study.stop()

    study = hocket.tune(train, SPACE, 30, 1, study=random_study(), slots=3, callbacks=[stop])
    assert len(seen) >= 3
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") == 3
    assert set(states) == {"COMPLETE", "FAIL"}
    assert sorted(seen) == list(range(len(states)))


def test_two_searches_share_a_storage(tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    first = hocket.tune(train, {"lr": LR}, 3, 1, storage=storage, name="shared", seed=0)
    second = hocket.tune(train, {"lr": LR}, 3, 1, storage=storage, name="shared", seed=1)
    assert first.study_name == second.study_name == "shared"
    assert len(second.trials) == 6


def test_a_study_of_another_direction_is_named():
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="mine", storage=storage, direction="maximize")
    with pytest.raises(InputError, match="direction: study mine is there already, to maximize, got 'minimize'"):
        hocket.tune(train, {"lr": LR}, 2, 1, storage=storage, name="mine")
    found = hocket.tune(train, {"lr": LR}, 2, 1, storage=storage, name="mine", direction="maximize")
    assert len(found.trials) == 2


def test_a_locked_storage_is_named(tmp_path):
    path = tmp_path / "study.db"
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 0.1}})
    study = random_study(storage=storage, study_name="mine")
    lock = sqlite3.connect(path)
    lock.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ExecutionError, match=r"study mine: its storage failed, is it locked or gone\? .*locked"):
        hocket.tune(train, {"lr": LR}, 2, 1, study=study)
    lock.close()
    storage.engine.dispose()


def test_a_storage_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ExecutionError, match="study mine: its storage failed, is it locked or gone"):
        hocket.tune(train, {"lr": LR}, 2, 1, storage=f"sqlite:///{tmp_path / 'no' / 'study.db'}", name="mine")
    with pytest.raises(ExecutionError, match=r"^a new study: its storage failed"):
        hocket.tune(train, {"lr": LR}, 2, 1, storage=f"sqlite:///{tmp_path / 'no' / 'study.db'}")


def test_without_optuna_one_line_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependencyError, match=r"hocket.tune needs optuna: pip install 'hocket\[tune\]'"):
        hocket.tune(train, {"lr": LR}, 2, 1)


def test_the_default_study_proposes_the_same_again():
    first = hocket.tune(train, {"lr": LR}, 12, 1, seed=4)
    second = hocket.tune(train, {"lr": LR}, 12, 1, seed=4)
    assert [trial.params for trial in first.trials] == [trial.params for trial in second.trials]
    assert len({trial.params["lr"] for trial in first.trials}) == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "slow"}, "executor: expected one of auto, serial, processes, fused, scheduled, got 'slow'"),
        ({"trials": 0}, "trials: expected a whole number >= 1, got 0"),
        ({"epochs": 1.5}, "epochs: expected a whole number >= 1, got 1.5"),
        ({"seed": -1}, "seed: expected a whole number >= 0, got -1"),
        ({"halving": 3}, "halving: expected hocket.Halving, Hyperband, Asha or Population, got 3"),
        ({"halving": hocket.Hyperband(), "trials": 5, "epochs": 9}, "Hyperband of 9 epochs takes 17, got 5"),
        ({"direction": "up"}, "direction: expected one of minimize, maximize, got 'up'"),
        ({"study": 3}, "study: expected an optuna.Study, got a value of type int"),
        ({"study": optuna.create_study(directions=["minimize"] * 2)}, "study: expected one direction, got 2"),
        ({"study": random_study(), "direction": "maximize"}, "study: expected it without direction"),
        ({"timeout": 0}, "timeout: expected seconds above 0, got 0"),
        ({"patience": 0}, "patience: expected a whole number >= 1, got 0"),
        ({"value": "first"}, "value: expected one of last, best, got 'first'"),
        ({"callbacks": print}, "callbacks: expected a list of functions, got <built-in function print>"),
        ({"callbacks": ["stop"]}, "callbacks: expected a list of functions"),
    ],
)
def test_bad_arguments_are_named(options, words):
    refused(words.replace("(", r"\("), hocket.tune, train, {"lr": LR}, **options)


@pytest.mark.parametrize("space", [{}, [LR], {"lr": 0.1}])
def test_a_space_of_another_form_is_named(space):
    refused("space: ", hocket.tune, train, space, 2, 1)


@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda outputs, target: outputs.mean(1), r"metric: expected a number, got a tensor of shape \(16,\)"),
        (lambda outputs, target: None, "metric: expected a number, got None"),
        (lambda outputs, target: "good", "metric: expected a number, got 'good'"),
    ],
)
def test_a_metric_that_is_no_number_ends_the_search(metric, words, executor):
    def wrong(params):
        return replace(train(params), metric=metric)

    study = random_study()
    refused(words, searched, wrong, {"lr": LR}, study=study, trials=3, epochs=1, executor=executor)
    assert {trial.state.name for trial in study.trials} == {"FAIL"}


def test_train_of_another_kind_is_named():
    refused("train: expected a function of the parameters, got a value of type int", hocket.tune, 3, {"lr": LR})
    with pytest.raises(InputError, match=r"expected it to return hocket.Training\(...\), got a value of type int"):
        hocket.tune(lambda params: 3, {"lr": LR}, 2, 1)


def test_trials_that_cannot_be_built_fail_alone_and_all_of_them_end_the_search(tmp_path):
    def picky(params):
        if params["lr"] != 0.01:
            raise RuntimeError("not this one")
        return train(params)

    space = {"lr": CategoricalDistribution([0.01, 0.02])}
    study, _ = searched(picky, space, trials=8, epochs=1)
    assert {trial.params["lr"]: trial.state.name for trial in study.trials} == {0.01: "COMPLETE", 0.02: "FAIL"}
    options = {"trials": 3, "epochs": 1, "checkpoints": tmp_path, "name": "s"}
    for storage in [optuna.storages.InMemoryStorage()] * 2:  # the same call goes on, and has nothing to do
        with pytest.raises(ExecutionError, match=r"all 3 trials failed; trial 0 .*: RuntimeError: not this one"):
            searched(picky, {"lr": CategoricalDistribution([0.03])}, storage=storage, **options)


def test_memory_bounds_how_many_are_fused():
    one = probe(train({})).slot_bytes
    weights = sum(p.numel() * 8 for p in train({}).model.parameters())
    assert one > 2 * 3 * weights + weights  # twice with both averages, and gradients
    _, record = searched(train, {"lr": LR}, trials=7, epochs=2, executor="fused", memory_bytes=3 * one + 1)
    assert max(each.slot for each in record.epochs) == 2
    _, record = searched(train, {"lr": LR}, trials=3, epochs=2, executor="fused", memory_bytes=1)
    assert {each.kind for each in record.epochs} == {"serial"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_table_on_a_terminal_and_a_line_a_rung_elsewhere():
    seen, texts, now_s = [], [], [0.0]
    for terminal in (Terminal(), io.StringIO()):
        with LiveTable(terminal, clock=lambda: now_s[0]) as live:

            def update(search, live=live):
                now_s[0] += 2.0
                seen.append(lines(search))
                live.update(search)

            options = {"trials": 4, "epochs": 4, "halving": Halving(eta=2), "executor": "fused"}
            study, _ = searched(train, {"lr": LR}, on_progress=update, **options)
        assert seen[-1][0].endswith(f"best value {study.best_value:.6g}")  # not that of a pruned trial
        texts.append(terminal.getvalue())
    assert seen[0][0].startswith("tune: 2 of 4 trials over, 4 epochs, best value ")
    assert seen[0][1] == "  all trials: 2 of 4 slots (fused), epoch 1 to 1, 0 waiting"
    assert [line.split(",")[:2] for line in texts[1].splitlines()] == [
        ["tune: 2 of 4 trials over", " 4 epochs"],
        ["tune: 3 of 4 trials over", " 6 epochs"],
        ["tune: 4 of 4 trials over", " 8 epochs"],
    ]


def test_a_long_rung_says_that_it_goes_on_and_a_short_search_ends_with_its_line():
    terminal, now_s = io.StringIO(), [0.0]
    with LiveTable(terminal, clock=lambda: now_s[0]) as live:

        def update(search):
            now_s[0] += 40.0
            live.update(search)

        searched(train, {"lr": LR}, trials=2, epochs=6, executor="fused", on_progress=update)
    assert [line.split(",")[1] for line in terminal.getvalue().splitlines()] == [" 4 epochs", " 8 epochs", " 12 epochs"]
    terminal = io.StringIO()
    with LiveTable(terminal, clock=lambda: 0.0) as live:
        searched(train, {"lr": LR}, trials=2, epochs=2, executor="serial", on_progress=live.update)
    assert terminal.getvalue().startswith("tune: 2 of 2 trials over, 4 epochs")


def test_optimizers_may_have_numbers_in_tensors():
    def tensors(params):
        made = train({})
        optimizer = torch.optim.Adam(made.model.parameters(), lr=torch.tensor(params["lr"]), foreach=False)
        return Training(made.model, optimizer, made.loss, BATCHES, accuracy)

    as_serial(tensors, {"lr": LR}, tolerance=1e-6, trials=3, epochs=2)
