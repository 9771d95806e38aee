r"""Fused groups on a Ray cluster: a Ray Tune trial is an actor that trains a whole group of an Optuna study's trials.

study --ask--> trials --infusible values--> groups --ray.tune--> actor 0: group 0, as by `hocket.tune`
  ^                                                         \--> actor 1: group 1
  \------------ tell: values of every epoch, ends <--------------/

Ray places the actors, on as many machines as it has, and shows how far each is; in an actor a group trains as by
`hocket.tune`, with the same values. All proposals are asked for at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import ExecutionError, MissingDependencyError
from hocket.search.run import Run, Status
from hocket.search.split import Split, Train, find_split, group_by
from hocket.search.study import WHY, StudyClient, load_optuna, new_study
from hocket.search.tune import SearchConfig, search

if TYPE_CHECKING:
    import optuna

__all__ = ["tune_on_ray"]

ENDS = {"COMPLETE": Status.COMPLETE, "PRUNED": Status.PRUNED, "FAIL": Status.FAILED}


def load_ray_tune() -> Any:
    """The module of Ray Tune, or a MissingDependencyError."""
    try:
        from ray import tune
    except ImportError:
        raise MissingDependencyError("ray.tune", "ray", "hocket.search.ray") from None
    return tune


def tune_on_ray(
    train: Train,
    space: Mapping[str, Any],
    trials: int,
    epochs: int = 10,
    *,
    study: optuna.Study | None = None,
    executor: str = "auto",
    slots: int = 64,
    fusible: Sequence[str] | None = None,
    seed: int = 0,
    resources: Mapping[str, float] | None = None,
    run_config: Any = None,
) -> optuna.Study:
    """Search for hyper-parameters, with a Ray actor for each group of trials that train as one fused model.

    Args:
        train: the user's own ``train(params) -> hocket.Training``, which Ray sends to its actors.
        space: Optuna's distributions by name.
        trials: how many trials are asked for, all at once.
        epochs: how many epochs each trains.
        study: an Optuna study of one direction, with its sampler and enqueued trials; a new one to minimize if None.
        executor: of `hocket.tune`, in each actor.
        slots: how many trials a group has at most; more of a kind become several groups.
        fusible: names of the parameters that change no shapes; found by trying if None.
        seed: of weights, random numbers and the order of data.
        resources: of one actor, such as ``{"cpu": 2, "gpu": 0.5}``.
        run_config: a `ray.tune.RunConfig`.

    Returns:
        The study, whose trials have a value for each epoch.

    Raises:
        MissingDependencyError: Ray Tune is not installed.
        ExecutionError: a group failed as a whole; its trials have failed, and the study keeps what the others gave.
    """
    tune = load_ray_tune()
    study = new_study("minimize", None, None) if study is None else study
    client = StudyClient(study, space)
    asked = dict(client.ask()[:2] for _ in range(trials))
    split = find_split(train, space, next(iter(asked.values())), seed, fusible)
    groups = [[number, asked[number]] for number in asked]
    parts = [[groups[place] for place in part] for part in _parts(split, list(asked.values()), slots)]
    options = {"epochs": epochs, "executor": executor, "slots": slots, "fusible": fusible, "seed": seed}
    direction = "maximize" if client.maximize else "minimize"

    def actor(config: Mapping[str, Any]) -> None:
        _train_group(train, space, [params for _, params in parts[config["group"]]], direction, options)

    trainable = actor if resources is None else tune.with_resources(actor, dict(resources))
    tuner = tune.Tuner(
        trainable, param_space={"group": tune.grid_search(list(range(len(parts))))}, run_config=run_config
    )
    lost = []
    for result in tuner.fit():
        part = parts[result.config["group"]]
        if result.error is None:
            for (number, params), end in zip(part, result.metrics["ends"], strict=True):
                _tell(client, number, params, end)
        else:
            lost.append(str(result.error))
            for number, params in part:
                _tell(client, number, params, {"state": "FAIL", "values": [], "error": lost[-1]})
    if lost:
        raise ExecutionError(f"{len(lost)} of {len(parts)} groups failed on Ray; the first: {lost[0]}")
    return study


def _parts(split: Split, proposals: Sequence[Mapping[str, Any]], slots: int) -> list[list[int]]:
    """The places of proposals that train together, at most so many."""
    groups = group_by(split, proposals).values()
    return [own[start : start + slots] for own in groups for start in range(0, len(own), slots)]


def _train_group(
    train: Train, space: Mapping[str, Any], proposals: Sequence[Mapping[str, Any]], direction: str, options: Any
) -> None:
    """In an actor: train the proposals, and report how far they are and at last how each ended."""
    tune, optuna = load_ray_tune(), load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=0))
    for params in proposals:
        study.enqueue_trial(dict(params))

    def progress(work: Any) -> None:
        epochs = [run.epochs for run in work.runs.values()]
        tune.report({"epochs": sum(epochs), "ends": []})

    config = SearchConfig(study=study, trials=len(proposals), on_progress=progress, **options)
    try:
        search(train, space, config)
    except ExecutionError:  # every trial of this group failed: each says why
        if any(not trial.state.is_finished() for trial in study.trials):
            raise
    ends = [
        {
            "state": trial.state.name,
            "values": [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)],
            "error": trial.user_attrs.get(WHY, ""),
        }
        for trial in study.trials
    ]
    tune.report({"epochs": sum(len(end["values"]) for end in ends), "ends": ends})


def _tell(client: StudyClient, number: int, params: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    run = Run(number, params, 0, status=ENDS[end["state"]], values=list(end["values"]), error=end["error"] or None)
    client.report(run)
    client.tell(run)
