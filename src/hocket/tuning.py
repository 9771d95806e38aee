"""`hocket.tune`: the one place that joins a search with what schedules its fused steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.search.fused import Runner
from hocket.search.page import LiveTable, load_plotly, write_page
from hocket.search.policy import Schedules
from hocket.search.split import Train
from hocket.search.tune import SearchConfig, search

if TYPE_CHECKING:
    import optuna

__all__ = ["tune"]


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
    """Search for hyper-parameters; trials that agree on all shapes train as one fused model.

    Every trial's values are those that it has alone, whatever it trains beside: its weights and random numbers follow
    from its parameters and `seed`, and the order of its data from `seed` and the epoch.

    Args:
        train: the user's own ``train(params) -> hocket.Training``, a function of one trial.
        space: Optuna's distributions by name. Without it, `train` itself says what there is to propose:
            ``params.suggest_float("lr", 1e-4, 1e-1, log=True)``, as Optuna's trials do.
        trials: how many trials (60); `Hyperband` says itself how many it takes.
        epochs: how many epochs a trial trains at most.
        halving: `hocket.Halving`, `hocket.Hyperband` or `hocket.Asha`, which end the worse trials early, or
            `hocket.Population`, by which they go on from the better ones; all trials go all epochs if None. The study's
            pruner is not asked: pruners decide one trial at a time, while all trials of a rung report at once here.
        study: an Optuna study of one direction, with its sampler, storage and enqueued trials.
        direction: without a study, ``"minimize"`` or ``"maximize"``; such a study proposes by TPE.
        storage: without a study, where its trials are kept: whatever `optuna.create_study` takes. In memory if None.
        name: without a study, its name; a study of this name is gone on with, if the storage has one.
        executor: ``"fused"``; ``"scheduled"``: fused, and the fused step planned by `hocket.schedule`; ``"serial"``:
            one trial after another; ``"processes"``: several processes with one trial each; or ``"auto"``: the
            same as ``"fused"``. Where trials cannot be fused, they train one at a time, and a warning says why.
        slots: how many trials are fused at most (64).
        memory_bytes: what the models of one group may take, with their optimizers and what their backward needs.
        fusible: names of the parameters that change no shapes; found by trying if None.
        seed: of weights, random numbers, the order of data, and proposals.
        timeout: seconds after which the search ends, at the next epoch. Trials that are not over are pruned; with
            `checkpoints` they stay, and the same call goes on with them.
        patience: after so many epochs without a better value a trial is complete; None for no such end.
        value: ``"last"`` or ``"best"``: which of its epochs' values counts for a trial, in the study and at rungs.
        checkpoints: a folder for the states of unfinished trials, and of the best one (``best.pt``). A search that was
            killed goes on when it is called again with the same study and folder.
        callbacks: called with the study and each trial that is over, as by ``study.optimize``; may call
            ``study.stop()``.
        processes: how many, for ``executor="processes"``; half the processors if None, at least two.
        cache: of `hocket.schedule`, for ``executor="scheduled"``.
        report: a folder for a page that shows what ran with what and when, and how the values went; needs plotly.

    Returns:
        The study, whose trials have a value for each epoch.

    Raises:
        InputError: an argument, a batch or a metric that nothing can be done with.
        ExecutionError: the storage failed, or all trials did; otherwise a trial that raises or whose loss is not finite
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
