"""Trainers: a number of slots, each with one trial, that go on epoch by epoch.

Trials move at epoch boundaries. A trial in no slot has its whole state in its own plain model, optimizer and scheduler.
`put` takes it from there and `take_out` brings it back, so a trial may go on in any slot of any trainer.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from hocket.errors import HocketError, InputError
from hocket.search.data import epoch_batches, joined, size_of, updates
from hocket.search.run import EpochResult, Run, Status, step_scheduler
from hocket.search.split import Train
from hocket.search.training import Training


class CannotFuseError(HocketError):
    """These trials do not train as one fused model. The message says why."""


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
        """An empty slot, or one whose trial is over or waits for others, or None where all train."""
        empty = [slot for slot, run in enumerate(self.slots) if run is None or run.status.is_over]
        waiting = [slot for slot, run in enumerate(self.slots) if run is not None and run.status is Status.PAUSED]
        return next(iter([*empty, *waiting]), None)

    def admits(self, run: Run) -> bool:
        """True if this trial may train beside those in the slots now."""
        return True

    @abstractmethod
    def put(self, slot: int, run: Run) -> None:
        """Let a trial go on in a slot. A trial that was there leaves it, with its state."""

    @abstractmethod
    def sync(self, slot: int) -> None:
        """Bring a trial's state into its own model, optimizer and scheduler, and leave it in its slot."""

    @abstractmethod
    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        """Train on for an epoch at least, and say what came of it."""

    def shrink(self) -> None:  # noqa: B027 - most trainers have nothing to give up
        """Give up slots that no trial needs, where that saves time."""

    def close(self) -> None:
        """Let go of all trials. Their states are in their own models."""
        for slot, run in enumerate(self.slots):
            if run is not None and not run.status.is_over:
                self.sync(slot)
            self.slots[slot] = None


def metric_value(result: Any) -> float:
    """The result of a metric as a number.

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


class EpochTrainer(Trainer):
    """Slots whose trials read the batches of an epoch together: those of a fused model, or the one of a plain model."""

    batch_dim: ClassVar[int]  # the axis of the batch in outputs
    setup: Training  # with the settings that all trials share
    model: Any  # the plain model, or the array

    def __init__(self, num_slots: int, seed: int) -> None:
        super().__init__(num_slots)
        self._seed = seed  # of the order of data
        self._failed: dict[int, EpochResult] = {}  # by slot, in this epoch

    @abstractmethod
    def train_batch(self, inputs: Any, target: Any, *, begins: bool, ends: bool) -> torch.Tensor:
        """Train on a batch, and return the losses by slot. Gradients begin anew before it, the optimizer steps
        after.
        """

    @abstractmethod
    def part(self, outputs: Any, slot: int) -> Any:
        """The outputs of one trial."""

    @abstractmethod
    def draws(self) -> AbstractContextManager[object]:
        """The context of what an epoch draws."""

    def train_epoch(self) -> list[tuple[Run, EpochResult]]:
        """Train all active trials for one epoch, measure them, and step their schedulers."""
        self._failed = {}
        active = self.active
        epoch = active[0][1].epochs
        with self.draws():
            totals = self._trained(epoch)
            values = self._measured(epoch)
        for slot, _ in active:
            if not math.isfinite(totals[slot]):
                self._failed[slot] = EpochResult(error=f"its loss is {totals[slot]} in epoch {epoch + 1}")
        self.step_schedulers(values)
        return [(run, self._failed.get(slot) or EpochResult(values[slot])) for slot, run in active]

    def step_schedulers(self, values: dict[int, float] | None = None) -> None:
        """Step each trial's scheduler after a step of the optimizer, or with the values of an epoch."""
        for slot, run in self.active:
            if slot not in self._failed:
                run.steps += values is None
                try:
                    step_scheduler(run.made, None if values is None else values[slot])
                except Exception as error:  # noqa: BLE001 - such as a cycle that is over; this trial ends, no other one
                    self._failed[slot] = EpochResult(error=f"{type(error).__name__}: {error}")

    def _trained(self, epoch: int) -> list[float]:
        """The sum of each slot's losses."""
        setup = self.setup
        self.model.train()
        total: Any = 0.0
        batches = epoch_batches(setup.batches, self._seed, epoch)
        for inputs, target, begins, ends in updates(batches, setup.accumulate):
            losses = self.train_batch(inputs, target, begins=begins, ends=ends)
            if ends and setup.scheduler_interval == "batch":
                self.step_schedulers()
            total = total + losses.detach().as_subclass(torch.Tensor)
        return total.tolist()

    def _measured(self, epoch: int) -> dict[int, float]:
        """The mean of each trial's metric by slot, without those that have failed."""
        setup, trainings = self.setup, {slot: run.made for slot, run in self.active}
        field = "batches" if setup.validation is None else "validation"
        found: dict[int, list[tuple[float, int]]] = {slot: [] for slot in trainings}

        def measure(outputs: Any, target: Any, size: int) -> None:
            for slot, training in trainings.items():
                if slot not in self._failed:
                    try:
                        found[slot].append((metric_value(training.metric(self.part(outputs, slot), target)), size))
                    except InputError:
                        raise
                    except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
                        self._failed[slot] = EpochResult(error=f"{type(error).__name__}: {error}")

        self.model.eval()
        whole: list[tuple[Any, Any]] = []
        with torch.no_grad(), setup.precision():
            for inputs, target in epoch_batches(setup.measured_on, self._seed, epoch, field):
                outputs = self.model(inputs)
                if setup.metric_interval == "epoch":
                    whole.append((outputs, target))
                else:
                    measure(outputs, target, size_of(target, inputs))
            if whole:
                parts, targets = ([pair[place] for pair in whole] for place in (0, 1))
                measure(joined(parts, self.batch_dim), joined(targets), 1)
        return {
            slot: sum(value * size for value, size in sums) / sum(size for _, size in sums)
            for slot, sums in found.items()
            if slot not in self._failed
        }


class SerialTrainer(EpochTrainer):
    """One slot, whose trial trains its plain model."""

    kind = "serial"
    batch_dim = 0

    def __init__(self, train: Train, seed: int) -> None:
        super().__init__(1, seed)
        self._train = train
        self._batches: list[tuple[Any, Any]] = []  # of one step, for an optimizer that needs a closure

    def put(self, slot: int, run: Run) -> None:
        self.slots[slot], self.setup = run, run.build(self._train)
        self.model = self.setup.model

    def sync(self, slot: int) -> None:
        """No-op: the trial's own model is the one that trains."""

    def part(self, outputs: Any, slot: int) -> Any:
        return outputs

    def draws(self) -> AbstractContextManager[object]:
        [run] = self.slots
        assert run is not None
        assert run.random is not None
        return run.random.active()

    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        try:
            return self.train_epoch()
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; this trial ends, no other one
            return [(run, EpochResult(error=f"{type(error).__name__}: {error}")) for _, run in self.active]

    def train_batch(self, inputs: Any, target: Any, *, begins: bool, ends: bool) -> torch.Tensor:
        setup = self.setup
        if begins:
            setup.optimizer.zero_grad()
            self._batches = []
        if needs_closure(setup.optimizer):
            self._batches.append((inputs, target))
            step: Any = setup.optimizer.step
            return torch.as_tensor(step(self._closure) if ends else 0.0).detach().reshape(1)
        loss = self._backward(inputs, target)
        if ends:
            self._clip()
            setup.optimizer.step()
        return loss.detach().sum().reshape(1)

    def _backward(self, inputs: Any, target: Any) -> torch.Tensor:
        setup = self.setup
        with setup.precision():
            loss = setup.loss(setup.model(inputs), target)
        (loss if setup.accumulate == 1 else loss / setup.accumulate).backward()
        return loss

    def _clip(self) -> None:
        setup, clipping = self.setup, torch.nn.utils
        if setup.clip_norm is not None:
            clipping.clip_grad_norm_(setup.model.parameters(), setup.clip_norm)
        if setup.clip_value is not None:
            clipping.clip_grad_value_(setup.model.parameters(), setup.clip_value)

    @torch.enable_grad()
    def _closure(self) -> torch.Tensor:
        """The loss of the batches of one step, whose gradients are there then."""
        self.setup.optimizer.zero_grad()
        losses = [self._backward(*batch).detach().sum() for batch in self._batches]
        self._clip()
        return torch.stack(losses).sum() / self.setup.accumulate


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True of LBFGS, and of an optimizer of the user's that cannot step without a closure either.

    Example:
        >>> params = [torch.nn.Parameter(torch.ones(2))]
        >>> needs_closure(torch.optim.LBFGS(params)), needs_closure(torch.optim.SGD(params))
        (True, False)
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
