"""One trial on its way: its parameters, how far it is, and all that it trains with."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.search.data import RandomState
from hocket.search.signature import Signature, signature
from hocket.search.split import Train, built
from hocket.search.training import Training

__all__ = ["EpochResult", "Run", "Status"]


class Status(enum.Enum):
    """Where a trial stands."""

    READY = "ready"  # may train, in a slot or waiting for one
    PAUSED = "paused"  # at the end of a rung, until the rung is decided
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether the trial trains no more."""
        return self in (Status.COMPLETE, Status.PRUNED, Status.FAILED)


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of one trial gave: a value, or the error that ended it."""

    value: float | None = None
    error: str | None = None


@dataclass(eq=False)
class Run:
    """A trial in training.

    Attributes:
        number: of the trial in its study.
        params: its hyper-parameters.
        seed: of its weights and its random numbers.
        values: the metric after each epoch so far.
        until: how many epochs it may go before it is decided on.
        training: what `train` made, whose tensors and numbers are the trial's own while it is in no fused slot; None
            before it is built and after it is over.
        random: the generators of the model's draws.
        saved: a state to go on from, once it is built.
        variant: tells groups apart whose infusible parameters agree and whose signatures or data do not.
    """

    number: int
    params: Mapping[str, Any]
    seed: int
    until: int = 0
    status: Status = Status.READY
    values: list[float] = field(default_factory=list)
    error: str | None = None
    training: Training | None = None
    signature: Signature = ()
    random: RandomState | None = None
    saved: Mapping[str, Any] | None = None
    variant: tuple[Any, ...] = ()

    @property
    def epochs(self) -> int:
        """How many epochs are done."""
        return len(self.values)

    def build(self, train: Train) -> Training:
        """All it trains with, made once; from the saved state, if there is one.

        Raises:
            Exception: whatever `train` raises.
        """
        if self.training is None:
            made = built(train, self.params, self.seed)
            self.random = RandomState(self.seed)
            self.signature = signature(made)
            self.training = made
            if self.saved is not None:
                self.load_state(self.saved)
                self.saved = None
        return self.training

    def state(self) -> dict[str, Any]:
        """All of it as plain tensors and numbers, which `load_state` takes."""
        if self.training is None:
            return dict(self.saved or {})
        assert self.random is not None
        scheduler = self.training.scheduler
        return {
            "values": list(self.values),
            "model": self.training.model.state_dict(),
            "buffers": dict(self.training.model.named_buffers()),  # a state dict leaves some out
            "optimizer": self.training.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "random": self.random.tensors(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        assert self.training is not None
        assert self.random is not None
        self.values = list(state["values"])
        self.training.model.load_state_dict(state["model"])
        for name, buffer in self.training.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.training.optimizer.load_state_dict(state["optimizer"])
        if self.training.scheduler is not None:
            self.training.scheduler.load_state_dict(state["scheduler"])
        self.random.load(state["random"])

    def restart(self) -> None:
        """Begin anew, from the first epoch."""
        self.release()
        self.values = []

    def release(self) -> None:
        """Let go of model and data."""
        self.training, self.saved, self.random = None, None, None
