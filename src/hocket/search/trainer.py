"""What trains trials: a number of slots, each with one trial, that go on epoch by epoch.

Trials move at epoch boundaries. A trial in no slot has its whole state in its own plain model, optimizer and scheduler;
`put` takes it from there and `take_out` brings it back, so a trial may go on in any slot of any trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hocket.errors import HocketError, InputError
from hocket.search.run import EpochResult, Run, Status

__all__ = ["CannotFuseError", "Trainer", "metric_value"]


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
        """Whether this trial may train beside those in the slots now."""
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
    """What a metric gave, as a number.

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
