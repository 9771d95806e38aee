"""The best trial's model after a search: from its checkpoints, or trained again alone, which gives the same."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hocket.errors import ExecutionError, FormatError, InputError
from hocket.search.checkpoints import read_state
from hocket.search.run import Run, load_model, set_attributes
from hocket.search.split import Train, built
from hocket.search.study import EXPLOITS, SEED
from hocket.search.trainer import SerialTrainer

if TYPE_CHECKING:
    import optuna


def best_model(
    study: optuna.Study, train: Train, *, seed: int | None = None, checkpoints: str | os.PathLike[str] | None = None
) -> nn.Module:
    """The model of the best trial, in evaluation mode, with the weights that gave its value.

    Args:
        study: what `hocket.tune` returned.
        train: the function that it was given.
        seed: likewise. By default the one that the trial was trained with, or 0 if an older version of Hocket has noted
            none.
        checkpoints: likewise. Without it the trial is trained again, alone, up to the epoch whose value was reported
            with. A trial has the values that it has alone.

    Raises:
        InputError: no trial is complete, the best one was trained with another seed, or it went on from another one's
            state, which only checkpoints keep.
        FormatError: the folder holds another trial's state.
        ExecutionError: the trial fails when it is trained again.

    Example:
        >>> import torch, hocket
        >>> loss = nn.functional.mse_loss
        >>> def train(params):
        ...     model = nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=params.suggest_float("lr", 0.01, 1, log=True))
        ...     return hocket.Training(model, optimizer, loss, [(torch.ones(4, 1), torch.zeros(4, 1))], metric=loss)
        >>> study = hocket.tune(train, trials=4, epochs=2)
        >>> model = best_model(study, train)
        >>> abs(loss(model(torch.ones(4, 1)), torch.zeros(4, 1)).item() - study.best_value) < 1e-6
        True
    """
    try:
        trial = study.best_trial
    except (ValueError, RuntimeError) as error:  # none is complete, or there are several directions
        raise InputError(f"study: {study.study_name} has no best trial: {error}") from None
    known = trial.user_attrs.get(SEED)
    if None not in (seed, known) and seed != known:
        raise InputError(f"seed: trial {trial.number}, the best one, was trained with {known}, got {seed}")
    seed = known or seed or 0
    epochs = sorted(trial.intermediate_values)
    values = [trial.intermediate_values[epoch] for epoch in epochs]
    if checkpoints is not None:
        path = Path(checkpoints) / "best.pt"
        state = read_state(path, "the best trial")
        if state["values"] != values[: len(state["values"])] or state["values"][-1:] != [trial.value]:
            raise FormatError(str(path), "", f"expected the state of trial {trial.number}, which is the best one now")
        training = built(train, state["params"], seed)
        load_model(training.model, state)
        set_attributes(training.model, state.get("attributes", {}))
        return training.model.eval()
    if EXPLOITS in trial.user_attrs:
        raise InputError("checkpoints: expected the folder, since the best trial went on from another one's state")
    told = [epoch for epoch, value in enumerate(values, 1) if value == trial.value]
    if not told:
        raise InputError(f"study: trial {trial.number}, the best one, has its value from no epoch of hocket.tune")
    run = Run(trial.number, {name: _meaning(trial, name) for name in trial.params}, seed)
    trainer = SerialTrainer(train, seed)
    trainer.put(0, run)
    while run.epochs < told[-1]:
        [(_, result)] = trainer.advance()
        if result.value is None:
            raise ExecutionError(f"trial {trial.number} cannot be trained again: {result.error}")
        run.values.append(result.value)
    return run.made.model.eval()


def _meaning(trial: optuna.trial.FrozenTrial, name: str) -> object:
    """A parameter as `train` was given it: storages keep a tuple or a list as its text."""
    value = trial.params[name]
    choices = getattr(trial.distributions[name], "choices", ())
    if isinstance(value, str) and value in choices and value[:1] in ("(", "["):
        with suppress(ValueError, SyntaxError):  # the user's own text, which only begins like one
            return ast.literal_eval(value)
    return value
