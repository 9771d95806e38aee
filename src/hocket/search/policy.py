"""Policies: the number of epochs of each trial, the early ends, and the value that counts.

A rung is an epoch at which only the best go on. All trials of a rung report at one epoch boundary when they train as
one model, so the whole rung is decided at once, on all of its values: exactly the best stay. (A pruner that decides
one trial at a time sees only some of them, and drops good ones.) ::

    epoch     1       3       9        halving of 9 trials, eta = 3, 9 epochs: the best third goes on
    trials    9  -->  3  -->  1

Sources: K. Jamieson and A. Talwalkar, AISTATS 2016 (successive halving). L. Li et al., "Hyperband", JMLR 18, 2018,
Algorithm 1. L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, Algorithm 2 (ASHA).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import InputError
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

    @abstractmethod
    def fail(self, number: int) -> Sequence[Move]:
        """A trial has ended before its time."""

    @abstractmethod
    def all_started(self) -> Sequence[Move]:
        """No more trials begin."""

    def rank(self, value: float, number: int) -> tuple[float, int]:
        """The sort key of trials, best first, earlier ones before later ones of equal value."""
        return (-value if self.maximize else value, number)


class Schedules:
    """A way to spend epochs: ``halving=`` of `hocket.tune`. By itself it lets every trial go all epochs."""

    def trials(self, epochs: int) -> int | None:
        """The number of trials needed, or None if the user chooses it."""
        return None

    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        """The policy of one search."""
        return LockStep(epochs, maximize, [(trials, [Rung(epochs, 0)])])


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
        first_best = values.index((max if maximize else min)(values))
        return len(values) - 1 - first_best >= self.patience


@dataclass(frozen=True)
class Rung:
    """An epoch at which the best `keep` trials go on. At the last one of a bracket none do."""

    epoch: int
    keep: int


@dataclass(frozen=True)
class Rungs(Schedules):
    """Epochs for the better trials only."""

    eta: int = 3  # at each rung one in `eta` trials goes on, for `eta` times the epochs
    min_epochs: int = 1  # the epoch of the first rung

    def __post_init__(self) -> None:
        check_whole("eta", self.eta, 2)
        check_whole("min_epochs", self.min_epochs, 1)

    def rungs(self, trials: int, first: int, epochs: int) -> list[Rung]:
        """The rungs of a bracket of this number of trials, from the epoch of the first rung to the last epoch."""
        found = []
        epoch = first
        while epoch < epochs and trials > 1:
            trials = max(1, trials // self.eta)
            found.append(Rung(epoch, trials))
            epoch *= self.eta
        return [*found, Rung(epochs, 0)]


@dataclass(frozen=True)
class Halving(Rungs):
    """Successive halving (Jamieson and Talwalkar, AISTATS 2016): at each rung the best of all trials go on.

    Attributes:
        eta: at each rung one trial in `eta` goes on, for `eta` times the epochs.
        min_epochs: the epoch of the first rung.

    Raises:
        InputError: `eta` below 2, or `min_epochs` below 1.

    Example:
        >>> Halving(eta=3, min_epochs=1).rungs(9, 1, 9)
        [Rung(epoch=1, keep=3), Rung(epoch=3, keep=1), Rung(epoch=9, keep=0)]
    """

    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        return LockStep(epochs, maximize, [(trials, self.rungs(trials, self.min_epochs, epochs))])


@dataclass(frozen=True)
class Hyperband(Rungs):
    """Hyperband (Li et al., JMLR 2018, Algorithm 1): brackets of halving, from many short trials to few long ones, all
    of which train side by side. `eta` and `min_epochs` are those of `Halving`.

    Attributes:
        skip_last: how many of a bracket's last rungs are left out, as in HFHT (Wang et al., Table 11).

    Example:
        >>> [(size, rungs[0].epoch) for size, rungs in Hyperband(eta=3).brackets(81)]
        [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    """

    skip_last: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("skip_last", self.skip_last, 0)

    def brackets(self, epochs: int) -> list[tuple[int, list[Rung]]]:
        """For each bracket how many trials begin, and its rungs."""
        most = epochs // self.min_epochs
        if most < 1:
            raise InputError(f"Hyperband: min_epochs: expected at most epochs={epochs}, got {self.min_epochs}")
        largest = 0
        while self.eta ** (largest + 1) <= most:
            largest += 1
        found = []
        for bracket in range(largest, -1, -1):
            size = -(-(largest + 1) * self.eta**bracket // (bracket + 1))
            first = epochs // self.eta**bracket
            # Rung `step` keeps ``floor(size / eta ** (step + 1))``, and at least one.
            rungs = [Rung(first * self.eta**step, max(1, size // self.eta ** (step + 1))) for step in range(bracket)]
            kept = [*rungs, Rung(epochs, 0)][: max(1, bracket + 1 - self.skip_last)]
            found.append((size, [*kept[:-1], Rung(kept[-1].epoch, 0)]))
        return found

    def trials(self, epochs: int) -> int | None:
        return sum(size for size, _ in self.brackets(epochs))

    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        return LockStep(epochs, maximize, self.brackets(epochs))


@dataclass(frozen=True)
class Asha(Rungs):
    """Asynchronous halving (Li et al., MLSys 2020, Algorithm 2): a trial goes on once it is among the best that have
    reached its rung. `eta` and `min_epochs` are those of `Halving`.

    Example:
        >>> [rung.epoch for rung in Asha(eta=2).rungs(4, 1, 8)]
        [1, 2, 8]
    """

    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        return Asynchronous(epochs, maximize, self)


@dataclass
class Bracket:
    """The trials of one bracket: who is on which rung, and what they reported there."""

    size: int
    rungs: list[Rung]
    at: int = 0
    members: list[int] = field(default_factory=list)  # alive on the present rung
    started: int = 0
    reported: dict[int, float] = field(default_factory=dict)


class LockStep(Policy):
    """Brackets whose rungs are decided at once, when all of their trials have reported."""

    def __init__(self, epochs: int, maximize: bool, brackets: Sequence[tuple[int, list[Rung]]]) -> None:
        super().__init__(epochs, maximize)
        self.brackets = [Bracket(size, list(rungs)) for size, rungs in brackets]
        self._of: dict[int, Bracket] = {}

    def start(self, number: int) -> int:
        bracket = next((each for each in self.brackets if each.started < each.size), self.brackets[-1])
        bracket.started += 1
        bracket.members.append(number)
        self._of[number] = bracket
        return bracket.rungs[0].epoch

    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        bracket = self._of[number]
        bracket.reported[number] = value
        return self._decided(bracket)

    def fail(self, number: int) -> Sequence[Move]:
        bracket = self._of[number]
        bracket.members.remove(number)
        return self._decided(bracket)

    def all_started(self) -> Sequence[Move]:
        found: list[Move] = []
        for bracket in self.brackets:
            bracket.size = bracket.started
            found += self._decided(bracket)
        return found

    def _decided(self, bracket: Bracket) -> list[Move]:
        """The decision on a rung, once all of its trials are there."""
        rung = bracket.rungs[bracket.at]
        if rung.keep == 0:  # the last one: no trial waits for the others
            done = [number for number in bracket.members if number in bracket.reported]
            bracket.members = [number for number in bracket.members if number not in bracket.reported]
            return [Move(number, "complete") for number in done]
        if bracket.started < bracket.size or any(number not in bracket.reported for number in bracket.members):
            return []
        ranked = sorted(bracket.members, key=lambda number: self.rank(bracket.reported[number], number))
        bracket.at += 1
        bracket.reported = {}
        return self._moves(bracket, rung, ranked, bracket.rungs[bracket.at].epoch)

    def _moves(self, bracket: Bracket, rung: Rung, ranked: Sequence[int], until: int) -> list[Move]:
        """The decision on a rung's trials, best first, and the epoch up to which they go next."""
        best, rest = ranked[: rung.keep], ranked[rung.keep :]
        bracket.members = sorted(best)
        return [
            *(Move(number, "prune") for number in sorted(rest)),
            *(Move(number, "go", until=until) for number in bracket.members),
        ]


class Asynchronous(Policy):
    """Rungs without waiting: with each report the best of a rung so far go on."""

    def __init__(self, epochs: int, maximize: bool, halving: Asha) -> None:
        super().__init__(epochs, maximize)
        self._eta = halving.eta
        self._epochs_of = []
        epoch = halving.min_epochs
        while epoch < epochs:
            self._epochs_of.append(epoch)
            epoch *= halving.eta
        self._epochs_of.append(epochs)
        self._rungs: list[dict[int, float]] = [{} for _ in self._epochs_of]
        self._promoted: list[set[int]] = [set() for _ in self._epochs_of]
        self._paused: dict[int, int] = {}  # the rung of each trial that waits
        self._training: set[int] = set()
        self._is_closed = False

    def start(self, number: int) -> int:
        self._training.add(number)
        return self._epochs_of[0]

    def report(self, number: int, epoch: int, value: float) -> Sequence[Move]:
        place = self._epochs_of.index(epoch)
        self._training.discard(number)
        if place == len(self._epochs_of) - 1:
            return [Move(number, "complete"), *self._drained()]
        rung = self._rungs[place]
        rung[number] = value
        self._paused[number] = place
        ranked = sorted(rung, key=lambda each: self.rank(rung[each], each))
        return [*self._promotions(place, ranked[: len(rung) // self._eta]), *self._drained()]

    def fail(self, number: int) -> Sequence[Move]:
        self._training.discard(number)
        return self._drained()

    def all_started(self) -> Sequence[Move]:
        self._is_closed = True
        return self._drained()

    def _promotions(self, place: int, best: Sequence[int]) -> list[Move]:
        found = [number for number in best if number not in self._promoted[place]]
        for number in found:
            self._promoted[place].add(number)
            del self._paused[number]
            self._training.add(number)
        return [Move(number, "go", until=self._epochs_of[place + 1]) for number in found]

    def _drained(self) -> list[Move]:
        """Let the best trial go on where none trains and none is to come: the search is too small for its rungs."""
        if not self._is_closed or self._training:
            return []
        if not self._paused or any(self._promoted[-2:-1]):
            over, self._paused = sorted(self._paused), {}
            return [Move(number, "prune") for number in over]
        place = max(self._paused.values())
        rung = self._rungs[place]
        waiting = [number for number, own in self._paused.items() if own == place]
        return self._promotions(place, [min(waiting, key=lambda each: self.rank(rung[each], each))])
