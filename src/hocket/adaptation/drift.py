"""Drift: step times have left those of the verdict, and it is worth measuring again.

A verdict is a comparison made once. Another program on the machine, a core taken away, a warmer processor or a
different phase of the training may turn it round. Every step's time is kept at hand anyway, so it is watched::

    ms   |                        . . .:. .    three windows in a row beyond the factor: drift
    3.0  |- - - - - - - - - - -.:- - - - - -   expected x factor
    2.0  |.:. . :.  . :. . .:.                 expected: what was compared, or the first window if less
    1.3  |- - - - - - - - - - - - - - - - -    expected / factor: too fast is a change of circumstances, too
         +--|-----|-----|-----|-----|-----|-->  windows: the median of each counts

The comparison alternated with eager steps on cold caches, so steps may become faster than it measured. The lower of the
two is expected. Measuring again costs steps that are slower than need be. So it waits until enough steps have
passed since the verdict, and until what the last search took is a small share of the time since then: a training run
never spends more than that share, however much its times jump about.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from hocket.errors import InputError


@dataclass(frozen=True)
class DriftLimits:
    """From when on a step time has drifted, and how often it may be acted on.

    Attributes:
        factor: how far a median departs from what is expected, up or down, to count.
        window: steps of which the median is taken.
        patience: windows in a row that must have departed in the same direction.
        rest_steps: steps after a verdict in which nothing is measured again.
        max_share: largest share of the time since the verdict that the last search may have taken.

    Raises `InputError` at construction for a factor not above 1, a count below 1, and a share outside (0, 1].
    """

    factor: float = 1.3
    window: int = 25
    patience: int = 4
    rest_steps: int = 500
    max_share: float = 0.05

    def __post_init__(self) -> None:
        if not 1 < self.factor < float("inf"):
            raise InputError(f"drift limits: expected factor > 1, got {self.factor!r}")
        for name in ("window", "patience", "rest_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"drift limits: expected {name} >= 1, got {getattr(self, name)!r}")
        if not 0 < self.max_share <= 1:
            raise InputError(f"drift limits: expected max_share above 0 and up to 1, got {self.max_share!r}")


@dataclass(frozen=True)
class Drift:
    """A step time that has departed from what was expected, in milliseconds."""

    expected_ms: float
    found_ms: float
    steps: int

    def __str__(self) -> str:
        return (
            f"step time went from {self.expected_ms:.3g} ms to {self.found_ms:.3g} ms "
            f"(over the last {self.steps} steps)"
        )


class DriftDetector:
    """Follows the step times after a verdict.

    The comparison measured `expected_ms`, a median, at the end of a search that took `searched_ms`.
    """

    def __init__(self, expected_ms: float, searched_ms: float, limits: DriftLimits = DriftLimits()) -> None:
        self.expected_ms = expected_ms
        self.limits = limits
        self._searched_ms = searched_ms
        self._steps = 0
        self._elapsed_ms = 0.0
        self._window: list[float] = []
        self._first = True
        self._direction = 0
        self._departed: deque[float] = deque(maxlen=limits.patience)

    def observe(self, took_ms: float) -> Drift | None:
        """Record one step, and return a `Drift` when it is time to measure again."""
        self._steps += 1
        self._elapsed_ms += took_ms
        self._window.append(took_ms)
        if len(self._window) < self.limits.window:
            return None
        found_ms = median(self._window)
        self._window.clear()
        if self._first:
            self._first = False
            self.expected_ms = min(self.expected_ms, found_ms)
        self._count(found_ms)
        if self.num_departed < self.limits.patience or not self._rested:
            return None
        return Drift(self.expected_ms, median(self._departed), self.limits.patience * self.limits.window)

    @property
    def num_departed(self) -> int:
        """Windows in a row, up to the limits' patience, that have departed in the same direction."""
        return len(self._departed)

    def _count(self, found_ms: float) -> None:
        factor = self.limits.factor
        direction = (found_ms > self.expected_ms * factor) - (found_ms * factor < self.expected_ms)
        if direction != self._direction:
            self._departed.clear()
        self._direction = direction
        if direction:
            self._departed.append(found_ms)

    @property
    def _rested(self) -> bool:
        enough = self._steps >= self.limits.rest_steps
        return enough and self._searched_ms <= self.limits.max_share * self._elapsed_ms
