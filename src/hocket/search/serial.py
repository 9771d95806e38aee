"""One trial at a time, by a plain loop with the user's own optimizer and scheduler: what all else must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.search.data import epoch_batches, size_of
from hocket.search.run import EpochResult, Run, step_scheduler
from hocket.search.split import Train
from hocket.search.trainer import Trainer, metric_value
from hocket.search.training import Training

__all__ = ["SerialTrainer", "averaged", "diverged", "train_epoch"]


class SerialTrainer(Trainer):
    """One slot.

    Args:
        train: the user's function.
        seed: of the order of data.
    """

    kind = "serial"

    def __init__(self, train: Train, seed: int) -> None:
        super().__init__(1)
        self._train = train
        self._seed = seed

    def put(self, slot: int, run: Run) -> None:
        run.build(self._train)
        self.slots[slot] = run

    def sync(self, slot: int) -> None:
        """It trains its own model as it is."""

    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        return [(run, train_epoch(run, self._seed)) for _, run in self.active]


def train_epoch(run: Run, seed: int) -> EpochResult:
    """Train a trial for one epoch by a plain loop, and measure it.

    Raises:
        InputError: batches or a metric that nothing can be done with.
    """
    training, random = run.training, run.random
    assert training is not None
    assert random is not None
    try:
        with random.active():
            total = _trained(training, seed, run.epochs)
            if not math.isfinite(total):
                return EpochResult(error=diverged(total, run.epochs))
            value = _measured(training, seed, run.epochs)
        step_scheduler(training.scheduler, value)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; this trial ends, no other one
        return EpochResult(error=f"{type(error).__name__}: {error}")
    return EpochResult(value)


def _trained(training: Training, seed: int, epoch: int) -> float:
    """The sum of an epoch's losses."""
    training.model.train()
    total: Any = 0.0
    for inputs, target in epoch_batches(training.batches, seed, epoch):
        training.optimizer.zero_grad()
        loss = training.loss(training.model(inputs), target)
        loss.backward()
        training.optimizer.step()
        total = total + loss.detach().sum()
    return float(total)


def _measured(training: Training, seed: int, epoch: int) -> float:
    training.model.eval()
    sums = []
    with torch.no_grad():
        for inputs, target in epoch_batches(training.measured_on, seed, epoch):
            outputs = training.model(inputs)
            sums.append((metric_value(training.metric(outputs, target)), size_of(target, inputs)))
    return averaged(sums)


def diverged(loss: float, epoch: int) -> str:
    """Why a trial ends whose losses are not finite."""
    return f"its loss is {loss} in epoch {epoch + 1}"


def averaged(sums: list[tuple[Any, int]]) -> float:
    """The mean of a metric over batches of these sizes."""
    return math.fsum(value * size for value, size in sums) / sum(size for _, size in sums)
