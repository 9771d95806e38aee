"""When a search or a trial ends early, and which of a trial's values counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ends"]


@dataclass(frozen=True)
class Ends:
    """When a search or a trial ends early, and which of a trial's values counts."""

    timeout_s: float | None = None  # after which a search ends at the next epoch
    patience: int | None = None  # after so many epochs without a better value a trial is complete
    is_best: bool = False  # whether a trial's best value counts, or its last one

    def value(self, values: Sequence[float], maximize: bool) -> float:
        """What counts of a trial that has these values."""
        return (max if maximize else min)(values) if self.is_best else values[-1]

    def is_stale(self, values: Sequence[float], maximize: bool) -> bool:
        """Whether a trial is out of patience.

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
