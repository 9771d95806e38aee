"""Every kind of sampler, storage and study of Optuna's: none ends a search in an error, and what is ignored is said."""

import logging
import warnings

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import (
    BruteForceSampler,
    GridSampler,
    NSGAIIISampler,
    NSGAIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from tests.search.pieces import LR, SPACE, train
from tests.search.searches import assert_same, random_study, searched

import hocket

GRID = {"step": [1, 2, 3], "width": [8, 12]}
STEPS = {"step": IntDistribution(1, 3), "width": CategoricalDistribution([8, 12])}


def quiet(make, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make(*args, **options)


def storage_of(kind, folder):
    if kind == "memory":
        return None
    if kind == "journal":
        backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
        return optuna.storages.JournalStorage(backend)
    return f"sqlite:///{folder / 'study.db'}"


EXHAUSTIVE = {"grid": lambda: GridSampler(GRID, seed=0), "brute force": lambda: quiet(BruteForceSampler, seed=0)}


@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.parametrize("name", EXHAUSTIVE)
@pytest.mark.parametrize("trials", [3, 6, 20])
def test_a_sampler_that_is_through_ends_the_search_with_each_point_once(name, trials, executor, caplog):
    study = optuna.create_study(sampler=EXHAUSTIVE[name]())
    searched(train, STEPS, study=study, trials=trials, epochs=1, executor=executor)
    points = [tuple(trial.params.values()) for trial in study.trials]
    assert len(points) == len(set(points)) == min(trials, 6)
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert ("the sampler proposes no more than these 6 of 20 trials" in caplog.text) is (trials == 20)
    assert not study._thread_local.in_optimize_loop


def test_a_strict_brute_force_which_may_repeat_points_ends_with_all_of_them():
    sampler = quiet(lambda: BruteForceSampler(seed=0, avoid_premature_stop=True))
    study = optuna.create_study(sampler=sampler)
    searched(train, STEPS, study=study, trials=20, epochs=1)
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 6
    assert len(study.trials) < 20


@pytest.mark.parametrize("storage", ["memory", "journal", "sqlite"])
def test_a_grid_is_gone_on_with_in_each_storage(storage, tmp_path):
    study = optuna.create_study(sampler=GridSampler(GRID, seed=0), storage=storage_of(storage, tmp_path))
    study.optimize(lambda trial: trial.suggest_int("step", 1, 3) + trial.suggest_categorical("width", [8, 12]), 2)
    for _ in range(2):  # a third of it, the rest, and nothing more
        hocket.tune(train, STEPS, 10, 2, study=study, checkpoints=tmp_path / "states")
    assert len({tuple(sorted(trial.params.items())) for trial in study.trials}) == len(study.trials) == 6


def test_a_grid_takes_enqueued_trials_and_those_of_an_early_end(caplog):
    study = optuna.create_study(sampler=GridSampler(GRID, seed=0), direction="maximize")
    study.enqueue_trial({"step": 2, "width": 12})
    hocket.tune(train, STEPS, 10, 4, study=study, halving=hocket.Halving(eta=2))
    assert len(study.trials) == 7  # the enqueued one, which Optuna does not count as a point of the grid, first
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED"}


SAMPLERS = {
    "random": lambda: RandomSampler(seed=0),
    "qmc": lambda: quiet(QMCSampler, seed=0, warn_independent_sampling=False),
    "nsga2": lambda: NSGAIISampler(seed=0, population_size=4),
    "nsga3": lambda: quiet(NSGAIIISampler, seed=0, population_size=4),
    "fixed": lambda: quiet(PartialFixedSampler, {"width": 12}, TPESampler(seed=0)),
    "tpe": lambda: TPESampler(seed=0, n_startup_trials=3),
    "multivariate": lambda: quiet(TPESampler, seed=0, n_startup_trials=3, multivariate=True, group=True),
}


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_propose_the_same_for_each_executor(name, direction):
    found = []
    for executor in ("serial", "fused"):
        study = optuna.create_study(sampler=SAMPLERS[name](), direction=direction)
        study.set_user_attr("of", "mine")
        searched(train, SPACE, study=study, trials=10, epochs=2, executor=executor, slots=5)
        assert study.user_attrs == {"of": "mine"}
        found.append(study)
    assert_same(*found)


def test_the_user_stops_a_search_from_anywhere():
    def stopping(params):
        made = train(params)

        def metric(outputs, target):
            if params["lr"] > 0.05:
                study.stop()
            return made.metric(outputs, target)

        return hocket.Training(made.model, made.optimizer, made.loss, made.batches, metric)

    study = random_study()
    searched(stopping, {"lr": LR}, study=study, trials=20, epochs=5, executor="serial")
    assert {trial.state.name for trial in study.trials} >= {"PRUNED"}


def test_what_is_ignored_is_said_once(caplog, tmp_path):
    storage = quiet(optuna.storages.RDBStorage, f"sqlite:///{tmp_path / 's.db'}", heartbeat_interval=60)
    study = random_study(pruner=optuna.pruners.HyperbandPruner(), storage=storage)
    study.enqueue_trial({"lr": 0.01, "rte": 0.5})
    study.enqueue_trial({"lr": 0.02, "rte": 0.5})
    with caplog.at_level(logging.WARNING):
        searched(train, {"lr": LR}, study=study, trials=3, epochs=1)
    said = [record.getMessage() for record in caplog.records if "hocket.tune" in record.getMessage()]
    assert [line.split(": ", 1)[1].split(" is ")[0].split(" was ")[0] for line in said] == [
        "the study's HyperbandPruner",
        "the storage's heartbeat",
        "trial 0",
        "trial 1",
    ]
