"""How long each trial trains: what a search asks after each epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.optim.hyper import check_whole

__all__ = ["AllEpochs", "Exploit", "Move", "Policy", "Schedules"]


@dataclass(frozen=True)
class Move:
    """What becomes of a trial."""

    number: int  # of the trial
    what: str  # ``"go"`` on, ``"prune"``, or ``"complete"``
    until: int = 0  # up to which epoch it goes on


@dataclass(frozen=True)
class Exploit(Move):
    """A trial goes on from a sibling's state, with other hyper-parameters."""

    parent: int = 0  # the number of the sibling
    # given the sibling's parameters, the space and the names of the fusible ones, those to go on with
    explore: Callable[[Mapping[str, Any], Mapping[str, Any], Sequence[str]], dict[str, Any]] = lambda own, *_: dict(own)


class Policy(ABC):
    """Decides, from the values that are reported, which trials go on."""

    def __init__(self, epochs: int, maximize: bool) -> None:
        self.epochs = check_whole("epochs", epochs, 1)
        self.maximize = maximize

    @abstractmethod
    def start(self, number: int) -> int:
        """A trial begins; up to which epoch it goes before it is decided on."""

    @abstractmethod
    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        """A trial has reached the epoch up to which it goes; decisions that follow, perhaps on others too."""

    def fail(self, number: int) -> Sequence[Move]:
        """A trial has ended before its time."""
        return ()

    def all_started(self) -> Sequence[Move]:
        """No more trials begin."""
        return ()

    def rank(self, value: float, number: int) -> tuple[float, int]:
        """What trials are sorted by, the best one first; of equal ones the one that began first."""
        return (-value if self.maximize else value, number)


class Schedules(ABC):
    """A way to spend epochs: what a user hands to `hocket.tune` as ``halving=``."""

    def trials(self, epochs: int) -> int | None:
        """How many trials it takes; None if that is for the user to say."""
        return None

    @abstractmethod
    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        """What decides in one search."""


class AllEpochs(Policy):
    """Every trial goes all epochs."""

    def start(self, number: int) -> int:
        return self.epochs

    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        return [Move(number, "complete")]
