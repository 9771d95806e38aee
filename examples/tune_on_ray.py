r"""Fused groups on a Ray cluster: each Ray Tune trial trains one group of an Optuna study's trials by `hocket.tune`.

    study --ask--> trials --values of `infusible`--> groups --ray.tune--> actor 0: group 0
      ^                                                              \--> actor 1: group 1
      \------------- report, tell: the values of every epoch <--------------/

Ray places the actors on as many machines as it has. In an actor a group trains as by `hocket.tune`, with the same
values. All proposals are asked for at once. Needs ``pip install 'hocket[ray]'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState
from ray import tune

import hocket
from hocket.errors import ExecutionError

ERROR = "hocket:error"


def tune_on_ray(
    train: Any,
    space: Mapping[str, Any],
    trials: int,
    epochs: int = 10,
    *,
    infusible: Sequence[str] = (),
    study: optuna.Study | None = None,
    slots: int = 64,
    resources: Mapping[str, float] | None = None,
    run_config: Any = None,
    **options: Any,
) -> optuna.Study:
    """Search for hyper-parameters, with a Ray actor for each group of trials that train as one fused model.

    Args:
        train: ``train(params) -> hocket.Training``, which Ray sends to its actors.
        space: Optuna's distributions by name.
        trials: number of trials.
        epochs: number of epochs of each trial.
        infusible: names of the parameters that change shapes. Trials of one actor agree on their values.
        study: an Optuna study of one direction. The default is a new one that minimizes.
        slots: maximum number of trials of an actor.
        resources: resources of one actor, such as ``{"cpu": 2, "gpu": 0.5}``.
        run_config: a `ray.tune.RunConfig`.
        options: further arguments of `hocket.tune`, in each actor.

    Returns:
        The study, whose trials have a value for each epoch.

    Raises:
        ExecutionError: an actor failed. Its trials are told as failed, those of other actors with their values.
    """
    study = optuna.create_study() if study is None else study
    groups: dict[Any, list[optuna.Trial]] = {}
    for _ in range(trials):
        trial = study.ask(dict(space))
        groups.setdefault(tuple(trial.params[name] for name in infusible), []).append(trial)
    parts = [own[start : start + slots] for own in groups.values() for start in range(0, len(own), slots)]
    proposals = [[dict(trial.params) for trial in part] for part in parts]
    options |= {"direction": study.direction.name.lower(), "epochs": epochs, "slots": slots}

    def actor(config: Mapping[str, Any]) -> None:
        tune.report({"ends": train_group(train, space, proposals[config["group"]], **options)})

    trainable = actor if resources is None else tune.with_resources(actor, dict(resources))
    tuner = tune.Tuner(
        trainable, param_space={"group": tune.grid_search(list(range(len(parts))))}, run_config=run_config
    )
    lost = []
    for result in tuner.fit():
        part = parts[result.config["group"]]
        if result.error is not None:
            lost.append(str(result.error))
        ends = [("FAIL", [], lost[-1])] * len(part) if result.error is not None else result.metrics["ends"]
        for trial, end in zip(part, ends, strict=True):
            tell(study, trial, *end)
    if lost:
        raise ExecutionError(f"{len(lost)} of {len(parts)} groups failed on Ray; the first: {lost[0]}")
    return study


def train_group(
    train: Any, space: Mapping[str, Any], proposals: Sequence[Mapping[str, Any]], *, direction: str, **options: Any
) -> list[tuple[str, list[float], str]]:
    """Train these proposals here. The result has the state, the values and the error of each."""
    study = optuna.create_study(
        direction=StudyDirection[direction.upper()], sampler=optuna.samplers.RandomSampler(seed=0)
    )
    for params in proposals:
        study.enqueue_trial(dict(params))
    try:
        hocket.tune(train, space, trials=len(proposals), study=study, **options)
    except ExecutionError:  # every trial of this group failed: each says why
        if any(not trial.state.is_finished() for trial in study.trials):
            raise
    return [
        (
            trial.state.name,
            [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)],
            trial.user_attrs.get(ERROR, ""),
        )
        for trial in study.trials
    ]


def tell(study: optuna.Study, trial: optuna.Trial, state: str, values: Sequence[float], error: str) -> None:
    """Report the values of a trial to the study, and how it ended."""
    for epoch, value in enumerate(values, 1):
        trial.report(value, epoch)
    if error:
        trial.set_user_attr(ERROR, error)
    is_complete = TrialState[state] is TrialState.COMPLETE
    study.tell(trial, values[-1] if is_complete else None, state=TrialState[state])
