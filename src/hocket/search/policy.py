"""Policies: the number of epochs of each trial, the early ends, and the value that counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.optim.hyper import check_whole


@dataclass(frozen=True)
class Move:
    """A decision on a trial."""

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
        """Note that a trial begins, and return the epoch up to which it goes before it is decided on."""

    @abstractmethod
    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        """Note that a trial has reached the epoch up to which it goes, and return decisions, perhaps on others too."""

    def fail(self, number: int) -> Sequence[Move]:
        """A trial has ended before its time."""
        return ()

    def all_started(self) -> Sequence[Move]:
        """No more trials begin."""
        return ()

    def rank(self, value: float, number: int) -> tuple[float, int]:
        """The sort key of trials, best first, earlier ones before later ones of equal value."""
        return (-value if self.maximize else value, number)


class Schedules(ABC):
    """A way to spend epochs: what a user hands to `hocket.tune` as ``halving=``."""

    def trials(self, epochs: int) -> int | None:
        """The number of trials needed, or None if the user chooses it."""
        return None

    @abstractmethod
    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        """The policy of one search."""


class AllEpochs(Policy):
    """Every trial goes all epochs."""

    def start(self, number: int) -> int:
        return self.epochs

    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        return [Move(number, "complete")]


@dataclass(frozen=True)
class Ends:
    """Early ends of a search or a trial, and which of a trial's values counts."""

    timeout_s: float | None = None  # after which a search ends at the next epoch
    patience: int | None = None  # a trial is complete after this number of epochs without a better value
    is_best: bool = False  # whether a trial's best value counts, or its last one

    def value(self, values: Sequence[float], maximize: bool) -> float:
        """The value that counts of a trial with these values."""
        return (max if maximize else min)(values) if self.is_best else values[-1]

    def is_stale(self, values: Sequence[float], maximize: bool) -> bool:
        """True if a trial is out of patience.

        Example:
            >>> [Ends(patience=2).is_stale(values, maximize=False) for values in ([3, 2, 2], [3, 2, 2, 2], [1, 0, 1])]
            [False, True, False]
        """
        if self.patience is None:
            return False
        best = self.best_epoch(values, maximize)
        return len(values) - best >= self.patience

    def best_epoch(self, values: Sequence[float], maximize: bool) -> int:
        """The first epoch with the best value, from 1."""
        return values.index((max if maximize else min)(values)) + 1
