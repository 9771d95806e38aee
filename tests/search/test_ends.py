"""When a search or a trial ends early, which value counts, what proposes itself, and the best model."""

import itertools
from dataclasses import replace
from functools import partial

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution
from tests.search.pieces import LR, SPACE, classifier, train, training, value_of
from tests.search.searches import alone, assert_alone, assert_same, random_study, searched, stopped_and_gone_on, values
from torch import nn

import hocket
from hocket import Halving
from hocket.errors import FormatError, InputError
from quick import covering
from support.refusals import fails, refused

RATES = {"lr": optuna.distributions.FloatDistribution(0.01, 2.0, log=True)}


def bumpy(params):
    """Values that go up and down: a large rate, and dropout."""
    return training(classifier(8, rate=0.3), params["lr"], partial(torch.optim.SGD, momentum=0.9))


def expected_end(own, patience, epochs):
    """Number of epochs of a trial that would have these values."""
    for epoch in range(1, epochs):
        best = min(range(epoch), key=lambda place: own[place])
        if epoch - 1 - best >= patience:
            return epoch
    return epochs


@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.parametrize("value", ["last", "best"])
def test_a_trial_without_patience_is_complete_with_the_value_that_counts(value, executor):
    study, _ = searched(bumpy, RATES, trials=8, epochs=12, patience=2, value=value, executor=executor)
    lengths = set()
    for trial in study.trials:
        assert trial.state.name == "COMPLETE"
        own = alone(bumpy, trial.params, 12)
        end = expected_end(own, 2, 12)
        lengths.add(end)
        assert list(trial.intermediate_values.values()) == pytest.approx(own[:end], rel=1e-9)
        assert trial.value == pytest.approx(min(own[:end]) if value == "best" else own[end - 1], rel=1e-9)
    assert len(lengths) > 1


@pytest.mark.parametrize("after", [2, 3, 4])
@pytest.mark.parametrize("options", [{"patience": 1}, {"value": "best"}, {"patience": 2, "value": "best"}])
def test_a_search_with_ends_that_stops_goes_on_with_the_same(options, after, tmp_path):
    options = {"trials": 8, "epochs": 8, "halving": Halving(eta=2), "executor": "fused", **options}
    whole, study = stopped_and_gone_on(bumpy, RATES, tmp_path, after, **options)
    assert study.best_value == pytest.approx(whole.best_value, rel=1e-9)
    assert not list(tmp_path.glob("trial-*"))


@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_trial_that_the_user_prunes_stays_pruned_after_a_kill(after, tmp_path):
    def pruned(params):
        def on_epoch(trial, epoch, value):
            if params["lr"] > 0.2 and epoch == 2:
                raise optuna.TrialPruned

        return replace(bumpy(params), on_epoch=on_epoch)

    options = {"trials": 8, "epochs": 8, "halving": Halving(eta=2), "executor": "fused"}
    stopped_and_gone_on(pruned, RATES, tmp_path, after, **options)


def ticking(monkeypatch, step_s):
    """A clock that goes on by a fixed time whenever the search reads it."""
    now_s = itertools.count(0.0, step_s)
    monkeypatch.setattr("hocket.search.search.perf_counter", lambda: next(now_s))


def test_a_search_ends_when_its_time_is_up(monkeypatch):
    ticking(monkeypatch, 1.0)
    study, _ = searched(train, SPACE, trials=40, epochs=30, timeout=100.0, executor="fused", slots=4)
    states = {trial.state.name for trial in study.trials}
    assert states <= {"COMPLETE", "PRUNED", "FAIL"}
    assert 0 < sum(len(own) for own in values(study).values()) < 40 * 30


def test_a_search_whose_time_is_up_goes_on_from_its_checkpoints(monkeypatch, tmp_path):
    options = {"trials": 8, "epochs": 4, "halving": Halving(eta=2), "executor": "fused"}
    whole, _ = searched(train, SPACE, storage=optuna.storages.InMemoryStorage(), **options)
    again = {"storage": optuna.storages.InMemoryStorage(), "name": "s", "checkpoints": tmp_path, **options}
    with monkeypatch.context() as clock:
        ticking(clock, 1.0)
        study, _ = searched(train, SPACE, timeout=25.0, **again)
    assert "RUNNING" in {trial.state.name for trial in study.trials}
    study, _ = searched(train, SPACE, **again)
    assert_same(whole, study)


def test_the_time_may_be_up_before_any_trial_is_over(monkeypatch):
    ticking(monkeypatch, 1.0)
    study, _ = searched(train, SPACE, trials=4, epochs=3, timeout=0.5)
    assert {trial.state.name for trial in study.trials} <= {"FAIL"}


def suggesting(params):
    width = params.suggest_categorical("width", [8, 12])
    made = train({"lr": params.suggest_float("lr", 1e-3, 1e-1, log=True), "width": width})
    if width == 12:
        made.optimizer.param_groups[0]["weight_decay"] = params.suggest_float("decay", 0.0, 0.1)
    return made


@pytest.mark.parametrize("executor", ["serial", "fused", "auto"])
def test_a_function_says_itself_what_there_is_to_propose(executor):
    study = hocket.tune(suggesting, trials=10, epochs=2, executor=executor)
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    for trial in study.trials:
        assert set(trial.params) == ({"width", "lr", "decay"} if trial.params["width"] == 12 else {"width", "lr"})
    assert_alone(study, suggesting, 2)
    assert len({trial.params["lr"] for trial in study.trials}) == 10


def test_what_a_function_suggests_is_the_same_space_as_a_dict_of_it():
    def plain(params):
        return train({"lr": params.suggest_float("lr", 1e-3, 1e-1, log=True), "step": params.suggest_int("step", 1, 4)})

    by_dict = hocket.tune(train, {"lr": LR, "step": SPACE["step"]}, trials=30, epochs=2, seed=3)
    assert_same(hocket.tune(plain, trials=30, epochs=2, seed=3), by_dict)


def branching(params):
    """Suggests other names in other trials."""
    made = train({"lr": params.suggest_float("lr", 1e-3, 1e-1, log=True)})
    group = made.optimizer.param_groups[0]
    if params.suggest_categorical("decays", [False, True]):
        group["weight_decay"] = params.suggest_float("decay", 0.0, 0.1)
    else:
        group["betas"] = (params.suggest_float("first", 0.8, 0.9), params.suggest_float("second", 0.9, 0.99))
    return made


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (suggesting, {"trials": 9, "epochs": 4, "halving": Halving(eta=2)}),
        (branching, {"trials": 12, "slots": 4, "seed": 2}),
    ],
)
def test_a_search_of_suggestions_goes_on_after_a_kill(function, options, after, tmp_path):
    storage, options = f"sqlite:///{tmp_path / 's.db'}", {"epochs": 1, "executor": "fused", **options}
    stopped_and_gone_on(function, None, tmp_path / "states", after, storage, **options)


def test_a_function_that_suggests_nothing_or_raises():
    with pytest.raises(InputError, match="space: none is given, and train suggests no parameter"):
        hocket.tune(lambda params: train({}), trials=2, epochs=1)

    def picky(params):
        if params.suggest_float("lr", 0.001, 0.1) > 0.05:
            raise RuntimeError("not this one")
        return train(params)

    def double_minded(params):
        if params.suggest_float("lr", 0.001, 0.1) > 0.05:
            params.suggest_int("lr", 1, 2)
        return train(params)

    for function in (picky, double_minded):
        study = hocket.tune(function, trials=8, epochs=1)
        states = {trial.params["lr"] > 0.05: trial.state.name for trial in study.trials}
        assert states == {True: "FAIL", False: "COMPLETE"}


def deep(params):
    sizes = [6, *params["sizes"], 3]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return training(nn.Sequential(*layers[:-1]).double(), params["lr"], torch.optim.Adam)


def deep_suggesting(params):
    sizes = params.suggest_categorical("sizes", [(8,), (8, 8), (12,)])
    return deep({"sizes": sizes, "lr": params.suggest_float("lr", 1e-3, 1e-1, log=True)})


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
@pytest.mark.parametrize(("function", "kind"), covering([deep, deep_suggesting], ["memory", "journal", "sqlite"]))
def test_categories_may_be_tuples(function, kind, tmp_path):
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    kinds = {
        "memory": optuna.storages.InMemoryStorage,
        "journal": lambda: optuna.storages.JournalStorage(backend),
        "sqlite": lambda: f"sqlite:///{tmp_path / 's.db'}",
    }
    space = {"sizes": CategoricalDistribution([(8,), (8, 8), (12,)]), "lr": LR} if function is deep else None
    options = {"storage": kinds[kind](), "name": "s", "checkpoints": tmp_path / "states", "executor": "fused"}
    searched(function, space, trials=3, epochs=1, **options)
    study, record = searched(function, space, trials=15, epochs=1, **options)
    assert len(study.trials) == 15
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert len(record.groups) == 3
    model = hocket.best_model(study, function)
    assert value_of(model) == pytest.approx(study.best_value, rel=1e-9)


@pytest.mark.parametrize("value", ["last", "best"])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_best_model_has_the_best_value(keeps, value, tmp_path):
    options = {"checkpoints": tmp_path} if keeps else {}
    study, _ = searched(bumpy, RATES, trials=6, epochs=8, value=value, executor="fused", **options)
    model = hocket.best_model(study, bumpy, **options)
    assert not model.training
    assert value_of(model) == pytest.approx(study.best_value, rel=1e-9)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_best_model_is_of_the_seed_that_its_trial_had(keeps, tmp_path):
    options = {"checkpoints": tmp_path} if keeps else {}
    study, _ = searched(bumpy, RATES, trials=3, epochs=2, seed=3, value="best", **options)
    for seed in (None, 3):
        model = hocket.best_model(study, bumpy, seed=seed, **options)
        assert value_of(model) == pytest.approx(study.best_value, rel=1e-9)
    with pytest.raises(InputError, match=r"seed: trial [012], the best one, was trained with 3, got 0"):
        hocket.best_model(study, bumpy, seed=0, **options)


def test_of_epochs_with_equal_values_the_same_one_is_the_best_with_and_without_checkpoints(tmp_path):
    def tied(params):
        return replace(bumpy(params), metric=lambda *_: 1.0)

    study, _ = searched(tied, RATES, trials=2, epochs=3, value="best", executor="fused", checkpoints=tmp_path)
    kept, again = (hocket.best_model(study, tied, **options) for options in ({"checkpoints": tmp_path}, {}))
    torch.testing.assert_close(kept.state_dict(), again.state_dict())


def test_each_trial_of_a_study_has_the_seed_of_its_search_and_old_ones_have_none():
    study = random_study()
    for seed in (3, 0):
        searched(bumpy, RATES, trials=2, epochs=2, seed=seed, value="best", study=study)
        assert value_of(hocket.best_model(study, bumpy)) == pytest.approx(study.best_value, rel=1e-9)
    assert [trial.user_attrs["hocket:seed"] for trial in study.trials] == [3, 3, 0, 0]
    old = random_study()
    for trial in study.trials[:2]:
        trial.user_attrs = {}
        old.add_trial(trial)
    assert value_of(hocket.best_model(old, bumpy, seed=3)) == pytest.approx(old.best_value, rel=1e-9)
    assert value_of(hocket.best_model(old, bumpy)) != pytest.approx(old.best_value, rel=1e-9)


def test_a_study_of_other_trials_has_no_best_model():
    several = optuna.create_study(directions=["minimize", "minimize"])
    several.add_trial(optuna.trial.create_trial(values=[1.0, 2.0]))
    refused("has no best trial", hocket.best_model, several, train)
    other = random_study()
    other.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values={1: 2.0}))
    refused("has its value from no epoch", hocket.best_model, other, train)


@pytest.mark.parametrize("content", [b"", b"text", {"values": [1.0]}])
def test_a_damaged_best_model_is_named(content, tmp_path):
    study, _ = searched(train, SPACE, trials=2, epochs=1, checkpoints=tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "best.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "best.pt")
    fails(FormatError, "expected the state of the best trial", hocket.best_model, study, train, checkpoints=tmp_path)


def test_a_best_model_that_is_not_there_is_named(tmp_path):
    refused("has no best trial", hocket.best_model, random_study(), train)
    study, _ = searched(train, SPACE, trials=2, epochs=1, checkpoints=tmp_path)
    with pytest.raises(FormatError, match="expected the state of the best trial"):
        hocket.best_model(study, train, checkpoints=tmp_path / "other")
    study.add_trial(optuna.trial.create_trial(value=-1.0, intermediate_values={1: -1.0}))
    fails(FormatError, "expected the state of trial 2", hocket.best_model, study, train, checkpoints=tmp_path)
