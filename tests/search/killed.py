"""A search that a test kills: python -m tests.search.killed FOLDER; it says when it begins, and when it is done."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import optuna
import torch
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


def run(folder: Path) -> optuna.Study:
    def over(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        with (folder / "over").open("a") as file:
            file.write(f"{trial.number}\n")

    return hocket.tune(
        train,
        SPACE,
        TRIALS,
        EPOCHS,
        halving=hocket.Halving(eta=2),
        storage=f"sqlite:///{folder / 'study.db'}",
        name="killed",
        executor="fused",
        checkpoints=folder / "states",
        callbacks=[over],
    )


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    print("begins", flush=True)
    run(Path(sys.argv[1]))
    print("done", flush=True)
