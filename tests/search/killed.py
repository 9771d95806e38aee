"""A search that a test kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import optuna
import torch
from tests.search import unsynced
from tests.search.pieces import BATCHES, SPACE, classifier
from torch.nn import functional

import hocket

TRIALS = 8
EPOCHS = 4


def train(params: dict[str, Any]) -> hocket.Training:
    model = classifier(params["width"], rate=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params["step"], 0.5)
    return hocket.Training(model, optimizer, functional.cross_entropy, BATCHES, metric, scheduler)


def metric(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)  # so that there is time to be killed in
    return functional.cross_entropy(outputs, target)


def storage_in(folder: Path) -> Any:
    return optuna.storages.get_storage(f"sqlite:///{folder / 'study.db'}")


def dies_after(method: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A method after whose last call the process is gone."""
    left = calls

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        result = method(*args, **kwargs)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return called


def run(folder: Path, method: str | None = None, calls: int = 0) -> optuna.Study:
    storage = storage_in(folder)
    if method is not None:
        setattr(storage, method, dies_after(getattr(storage, method), calls))

    def over(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        with (folder / "over").open("a") as file:
            file.write(f"{trial.number}\n")

    return hocket.tune(
        train,
        SPACE,
        TRIALS,
        EPOCHS,
        halving=hocket.Halving(eta=2),
        storage=storage,
        name="killed",
        executor="fused",
        checkpoints=folder / "states",
        callbacks=[over],
    )


def killed(pipe: Connection, folder: Path, method: str | None = None, calls: int = 0) -> None:
    """Search in a process of its own; kill it right after some calls of this method of its storage, if any."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    os.fsync = unsynced.fsync
    pipe.send("begins")
    run(folder, method, calls)
    pipe.send("done")
