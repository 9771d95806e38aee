"""Trainers: a number of slots, each with one trial, that go on epoch by epoch.

Trials move at epoch boundaries. A trial in no slot has its whole state in its own plain model, optimizer and scheduler;
`put` takes it from there and `take_out` brings it back, so a trial may go on in any slot of any trainer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hocket.errors import HocketError, InputError
from hocket.search.data import epoch_batches, joined, size_of, updates
from hocket.search.run import EpochResult, Run, Status, step_scheduler
from hocket.search.split import Train
from hocket.search.training import Training

__all__ = ["CannotFuseError", "SerialTrainer", "Trainer", "averaged", "diverged", "metric_value", "train_epoch"]


class CannotFuseError(HocketError):
    """These trials do not train as one fused model; the message says why."""


class Trainer(ABC):
    """Slots for the trials of one group."""

    kind: ClassVar[str]  # what a report calls it

    def __init__(self, num_slots: int) -> None:
        self.slots: list[Run | None] = [None] * num_slots  # the trial in each slot, or None

    @property
    def active(self) -> list[tuple[int, Run]]:
        """Slots whose trials may train on, with these."""
        return [(slot, run) for slot, run in enumerate(self.slots) if run is not None and run.status is Status.READY]

    def free_slot(self) -> int | None:
        """An empty slot, else one whose trial is over or waits for others; None where all train."""
        empty = [slot for slot, run in enumerate(self.slots) if run is None or run.status.is_over]
        waiting = [slot for slot, run in enumerate(self.slots) if run is not None and run.status is Status.PAUSED]
        return next(iter([*empty, *waiting]), None)

    def admits(self, run: Run) -> bool:
        """True if this trial may train beside those in the slots now."""
        return True

    @abstractmethod
    def put(self, slot: int, run: Run) -> None:
        """Let a trial go on in a slot; whose trial was there leaves it, with its state."""

    @abstractmethod
    def sync(self, slot: int) -> None:
        """Bring a trial's state into its own model, optimizer and scheduler, and leave it in its slot."""

    @abstractmethod
    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        """Train on for an epoch at least, and say what came of it."""

    def shrink(self) -> None:  # noqa: B027 - most trainers have nothing to give up
        """Give up slots that nobody needs, where that saves time."""

    def close(self) -> None:
        """Let go of all trials; their states are in their own models."""
        for slot, run in enumerate(self.slots):
            if run is not None and not run.status.is_over:
                self.sync(slot)
            self.slots[slot] = None


def metric_value(result: Any) -> float:
    """The result of a metric as a number.

    Raises:
        InputError: it is no number.

    Example:
        >>> metric_value(torch.tensor([0.5])), metric_value(2)
        (0.5, 2.0)
        >>> metric_value(torch.zeros(3))
        Traceback (most recent call last):
        ...
        hocket.errors.InputError: metric: expected a number, got a tensor of shape (3,)
    """
    if isinstance(result, torch.Tensor):
        if result.numel() != 1:
            raise InputError(f"metric: expected a number, got a tensor of shape {tuple(result.shape)}")
        return float(result.item())
    if result is None or getattr(result, "shape", ()) != ():
        got = "None" if result is None else f"a value of shape {result.shape}"
        raise InputError(f"metric: expected a number, got {got}")
    try:
        return float(result)
    except (TypeError, ValueError):
        raise InputError(f"metric: expected a number, got {result!r}") from None


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
    """Train a trial for one epoch by a plain loop, and measure it."""
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
    """The error of a trial whose losses are not finite."""
    return f"its loss is {loss} in epoch {epoch + 1}"


def averaged(sums: list[tuple[Any, int]]) -> float:
    """The mean of a metric over batches of these sizes."""
    return math.fsum(value * size for value, size in sums) / sum(size for _, size in sums)
