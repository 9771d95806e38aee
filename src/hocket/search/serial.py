"""One trial at a time, by a plain loop with the user's own optimizer and scheduler: what all else must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.search.data import epoch_batches, joined, size_of, updates
from hocket.search.run import EpochResult, Run, step_scheduler
from hocket.search.split import Train
from hocket.search.trainer import Trainer, metric_value
from hocket.search.training import Training

__all__ = ["SerialTrainer", "averaged", "diverged", "train_epoch"]


class SerialTrainer(Trainer):
    """One slot."""

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
    training, random = run.made, run.random
    assert random is not None
    try:
        with random.active():
            total = _trained(training, seed, run.epochs)
            if not math.isfinite(total):
                return EpochResult(error=diverged(total, run.epochs))
            value = _measured(training, seed, run.epochs)
        step_scheduler(training, value)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; this trial ends, no other one
        return EpochResult(error=f"{type(error).__name__}: {error}")
    return EpochResult(value)


def _trained(training: Training, seed: int, epoch: int) -> float:
    """The sum of an epoch's losses."""
    training.model.train()
    total: Any = 0.0
    batches = epoch_batches(training.batches, seed, epoch)
    for inputs, target, begins, ends in updates(batches, training.accumulate):
        if begins:
            training.optimizer.zero_grad()
        with training.precision():
            loss = training.loss(training.model(inputs), target)
        (loss if training.accumulate == 1 else loss / training.accumulate).backward()
        if ends:
            _clip(training)
            training.optimizer.step()
            if training.scheduler is not None and training.scheduler_interval == "batch":
                training.scheduler.step()
        total = total + loss.detach().sum()
    return float(total)


def _clip(training: Training) -> None:
    if training.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
    if training.clip_value is not None:
        torch.nn.utils.clip_grad_value_(training.model.parameters(), training.clip_value)


def _measured(training: Training, seed: int, epoch: int) -> float:
    training.model.eval()
    measured = []
    with torch.no_grad(), training.precision():
        for inputs, target in epoch_batches(training.measured_on, seed, epoch):
            outputs = training.model(inputs)
            if training.metric_interval == "epoch":
                measured.append((outputs, target))
            else:
                measured.append((metric_value(training.metric(outputs, target)), size_of(target, inputs)))
        if training.metric_interval == "epoch":
            return metric_value(training.metric(*joined(measured)))
    return averaged(measured)


def diverged(loss: float, epoch: int) -> str:
    """Why a trial ends whose losses are not finite."""
    return f"its loss is {loss} in epoch {epoch + 1}"


def averaged(sums: list[tuple[Any, int]]) -> float:
    """The mean of a metric over batches of these sizes."""
    return math.fsum(value * size for value, size in sums) / sum(size for _, size in sums)
