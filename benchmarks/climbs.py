"""Hill climbs of single ops whose times are known, for the accuracy of Table V of Liu et al. (IPDPS 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from hocket.ir import Costs, Op
from hocket.profiling.hill_climb import HillClimb, Setting


@dataclass(frozen=True)
class Climb:
    """The result of a climb.

    Attributes:
        times_us: width -> microseconds, of the better affinity. Only measured widths.
        path: the widths that the climb itself visited, in order. `times_us` may have others.
        num_steps: training steps it took.
    """

    times_us: Mapping[int, float]
    path: tuple[int, ...]
    num_steps: int

    @cached_property
    def best_width(self) -> int:
        """The fastest measured width, the narrowest one if several are equally fast."""
        return min(self.times_us, key=lambda width: (self.times_us[width], width))

    @property
    def best_us(self) -> float:
        return self.times_us[self.best_width]

    def predict_us(self, width: int) -> float:
        """Predict the time at any width by the rule of `Costs`."""
        return self._costs.duration_us("op", width=width)

    @cached_property
    def _costs(self) -> Costs:
        return Costs({"op": {str(width): time_us for width, time_us in sorted(self.times_us.items())}})


def climb(
    time_us: Callable[[int, str], float],
    cores: int,
    interval: int = 4,
    *,
    also: Iterable[int] | None = None,
    **options: Any,
) -> Climb:
    """Climb with one op whose time at a width and affinity `time_us` gives. See `HillClimb` for the arguments.

    Example:
        >>> climb(lambda width, affinity: 100.0 / width + width, cores=68).best_width
        9
    """

    def measured(also: Iterable[int] | None) -> dict[Setting, float]:
        search = HillClimb([Op("op")], cores, interval, also=also, **options)
        found: dict[Setting, float] = {}
        while wanted := search.wanted:
            for setting in wanted:
                found[setting] = time_us(*setting)
                search.record("op", setting.width, found[setting], setting.affinity)
        return found

    samples_us = measured(also)
    times_us: dict[int, float] = {}
    for (width, _), us in samples_us.items():
        times_us[width] = min(us, times_us.get(width, math.inf))
    path = tuple(sorted({width for width, _ in measured(())}))
    return Climb(times_us, path, len(samples_us))


def accuracy(found: Climb, actual_us: Mapping[int, float], widths: Iterable[int] | None = None) -> float:
    """Return one minus the mean of |predicted - actual| / actual over the widths that were not measured.

    Args:
        found: the climb.
        actual_us: width -> microseconds.
        widths: the widths to compare. Defaults to all of `actual_us`.

    Returns:
        The accuracy, or NaN if all of these widths were measured.
    """
    judged = [width for width in (actual_us if widths is None else widths) if width not in found.times_us]
    if not judged:
        return math.nan
    return 1 - fmean(abs(found.predict_us(width) - actual_us[width]) / actual_us[width] for width in judged)
