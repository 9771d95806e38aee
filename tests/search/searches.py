"""Searches that tests compare."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import pytest

from hocket.search.run import Run
from hocket.search.search import Record
from hocket.search.trainer import SerialTrainer
from hocket.search.tune import SearchConfig, search


class StoppedError(Exception):
    """A test raises it in the middle of a search."""


def stopping(after: int, error: type[BaseException] = StoppedError) -> Any:
    """A progress that raises after a number of epochs."""
    left = after

    def progress(_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    return progress


def random_study(seed: int = 0, **options: Any) -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), **options)


def searched(function: Any, space: dict[str, Any], **options: Any) -> tuple[optuna.Study, Record]:
    if not {"study", "storage", "direction"} & set(options):
        options["study"] = random_study()
    return search(function, space, SearchConfig(**options))


def values(study: optuna.Study) -> dict[int, dict[int, float]]:
    """Every trial's value after each epoch."""
    return {trial.number: dict(trial.intermediate_values) for trial in study.trials}


def exploits(study: optuna.Study) -> dict[int, list[dict[str, Any]]]:
    return {trial.number: trial.user_attrs.get("hocket:exploits", []) for trial in study.trials}


def assert_same(first: optuna.Study, second: optuna.Study, tolerance: float = 1e-9) -> None:
    """The same trials with the same ends and exploits, and values within a tolerance."""
    mine, its = values(first), values(second)
    assert [trial.state for trial in first.trials] == [trial.state for trial in second.trials]
    assert [trial.params for trial in first.trials] == [trial.params for trial in second.trials]
    assert exploits(first) == exploits(second)
    for number, own in mine.items():
        assert own.keys() == its[number].keys(), number
        for epoch, value in own.items():
            assert abs(value - its[number][epoch]) <= tolerance * max(1.0, abs(value)), (number, epoch)


def as_serial(
    function: Any, space: dict[str, Any], tolerance: float = 1e-9, **options: Any
) -> tuple[optuna.Study, Record]:
    """A search of trials together, fused unless `options` say otherwise: it finds what trials one by one give."""
    together, record = searched(function, space, **{"executor": "fused", **options})
    only = {key: value for key, value in options.items() if key in ("trials", "epochs", "halving")}
    serial, plain = searched(function, space, executor="serial", **only)
    assert {each.kind for each in plain.epochs} == {"serial"}
    assert_same(serial, together, tolerance)
    return together, record


def stopped_and_gone_on(
    function: Any, space: Any, folder: Path, after: int, storage: Any = None, **options: Any
) -> tuple[optuna.Study, optuna.Study]:
    """A whole search, and one that stops after a number of epochs and goes on: it repeats none and finds the same."""
    whole, _ = searched(function, space, storage=optuna.storages.InMemoryStorage(), **options)
    storage = storage or optuna.storages.InMemoryStorage()
    again = {"storage": storage, "name": "s", "checkpoints": folder, **options}
    with pytest.raises(StoppedError):
        searched(function, space, on_progress=stopping(after), **again)
    before = values(optuna.load_study(study_name="s", storage=storage))
    study, record = searched(function, space, **again)
    assert_same(whole, study)
    trained = [(each.number, each.epoch) for each in record.epochs]
    assert len(set(trained)) == len(trained)
    assert not {(number, epoch) for number, own in before.items() for epoch in own} & set(trained)
    return whole, study


def advance(trainer: Any, epochs: int = 1) -> None:
    """Train all slots for a number of epochs, and keep their values."""
    for _ in range(epochs):
        for run, result in trainer.advance():
            run.values.append(result.value)


def run_alone(function: Any, params: dict[str, Any], epochs: int) -> Run:
    """A trial that has trained by itself."""
    run = Run(0, params, seed=0)
    trainer = SerialTrainer(function, 0)
    trainer.put(0, run)
    advance(trainer, epochs)
    return run


def alone(function: Any, params: dict[str, Any], epochs: int) -> list[float]:
    return run_alone(function, params, epochs).values


def assert_alone(study: optuna.Study, function: Any, epochs: int, tolerance: float = 1e-9) -> None:
    """Each trial has the values that it has alone."""
    for trial in study.trials:
        own = list(trial.intermediate_values.values())
        assert own == pytest.approx(alone(function, trial.params, epochs), rel=tolerance)


def assert_runs_alone(runs: Iterable[Run], function: Any) -> None:
    """Each run has the values that it has alone."""
    for run in runs:
        assert run.values == pytest.approx(alone(function, run.params, run.epochs), rel=1e-9)
