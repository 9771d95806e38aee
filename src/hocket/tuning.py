"""`hocket.tune`: the one place that joins a search with what schedules its fused steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.search.fused import Runner
from hocket.search.policy import Schedules
from hocket.search.progress import LiveTable
from hocket.search.split import Train
from hocket.search.tune import SearchConfig, search
from hocket.tuning_page import load_plotly, write_page

if TYPE_CHECKING:
    import optuna


def tune(
    train: Train,
    space: Mapping[str, Any] | None = None,
    trials: int | None = None,
    epochs: int = 10,
    *,
    halving: Schedules | None = None,
    study: optuna.Study | None = None,
    direction: str = "minimize",
    storage: Any = None,
    name: str | None = None,
    executor: str = "auto",
    slots: int | None = None,
    memory_bytes: int | None = None,
    fusible: Sequence[str] | None = None,
    seed: int = 0,
    timeout: float | None = None,
    patience: int | None = None,
    value: str = "last",
    checkpoints: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callable[[Any, Any], object]] = (),
    processes: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    report: str | os.PathLike[str] | None = None,
) -> optuna.Study:
    """Search for hyper-parameters. Trials that agree on all shapes train as one fused model.

    Every trial has the values that it would have alone: its weights and random numbers follow from its parameters and
    `seed`, and the order of its data from `seed` and the epoch.

    Args:
        train: the user's own ``train(params) -> hocket.Training``, a function of one trial.
        space: Optuna's distributions by name. Without it, `train` itself defines the space:
            ``params.suggest_float("lr", 1e-4, 1e-1, log=True)``, as Optuna's trials do.
        trials: how many trials (60). `Hyperband` determines the number itself.
        epochs: how many epochs a trial trains at most.
        halving: `hocket.Halving`, `hocket.Hyperband` or `hocket.Asha`, which end the worse trials early, or
            `hocket.Population`, by which they continue from the better ones. If None, all trials train all epochs. The
            study's pruner is not used: pruners decide one trial at a time, while all trials of a rung report at once.
        study: an Optuna study of one direction, with its sampler, storage and enqueued trials.
        direction: without a study, ``"minimize"`` or ``"maximize"``. Such a study proposes by TPE.
        storage: without a study, where its trials are kept: a value for `optuna.create_study`. In memory if None.
        name: without a study, its name. If the storage has a study of this name, it is continued.
        executor: ``"fused"``, ``"scheduled"`` (fused, and the fused step planned by `hocket.schedule`), ``"serial"``
            (one trial after another), ``"processes"`` (several processes with one trial each), or ``"auto"``, the same
            as ``"fused"``: an array of models measures itself whether it computes them one by one. Trials that cannot
            be fused train one at a time, and a warning gives the reason.
        slots: how many trials are fused at most (64).
        memory_bytes: limit for the models of one group, with their optimizers and the memory of their backward.
        fusible: names of the parameters that change no shapes. Found by trying if None.
        seed: of weights, random numbers, the order of data, and proposals.
        timeout: seconds after which the search ends, at the next epoch. Unfinished trials are pruned. With
            `checkpoints` they stay, and the same call continues them.
        patience: a trial is complete after this many epochs without a better value. None for no limit.
        value: ``"last"`` or ``"best"``: which of its epochs' values counts for a trial, in the study and at rungs.
        checkpoints: a folder for the states of unfinished trials, and of the best one (``best.pt``). A search that was
            killed continues when it is called again with the same study and folder.
        callbacks: called with the study and each finished trial, as by ``study.optimize``. They may call
            ``study.stop()``.
        processes: how many, for ``executor="processes"``. Half the processors if None, at least two.
        cache: of `hocket.schedule`, for ``executor="scheduled"``.
        report: a folder for a page that shows which trials ran together and when, and their values. Needs plotly.

    Returns:
        The study, whose trials have a value for each epoch.

    Raises:
        InputError: an invalid argument, batch or metric.
        ExecutionError: the storage failed, or all trials did. Otherwise a trial that raises or whose loss is not finite
            fails alone.
        MissingDependencyError: Optuna is not installed (or plotly, for a report).

    Example:
        >>> import hocket, torch
        >>> from optuna.distributions import FloatDistribution
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(1)
        >>> loss = torch.nn.functional.mse_loss
        >>> def train(params):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        ...     return hocket.Training(model, optimizer, loss, [(x, 2 * x)], metric=loss)
        >>> study = hocket.tune(train, {"lr": FloatDistribution(0.01, 1, log=True)}, trials=8, epochs=3)
        >>> len(study.trials), len(study.best_trial.intermediate_values)
        (8, 3)
    """
    if report is not None:
        load_plotly()
    runner: Runner | None = None
    if executor == "scheduled":
        from hocket.session import schedule

        def runner(step: Any, array: Any, optimizer: Any) -> Any:
            return schedule(step, array, optimizer, cache=cache, numerics="rounding")

    with LiveTable(sys.stderr) as live:
        config = SearchConfig(
            trials=trials,
            epochs=epochs,
            halving=halving,
            study=study,
            direction=direction,
            storage=storage,
            name=name,
            executor=executor,
            slots=slots,
            memory_bytes=memory_bytes,
            fusible=fusible,
            seed=seed,
            timeout=timeout,
            patience=patience,
            value=value,
            checkpoints=checkpoints,
            callbacks=callbacks,
            processes=processes,
            runner=runner,
            on_progress=live.update,
        )
        found, record = search(train, space, config)
    if report is not None:
        write_page(found, record, report)
    return found
