"""Tables IV and V of Liu et al. (IPDPS 2019): regression models by samples, hill climbing by interval.

``table_iv()`` and ``table_v()`` print with rich.

Table V has hill climbs of single ops whose times are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.curves import Curves
from benchmarks.knl import published_knl
from benchmarks.regression import MODELS, Score, evaluate
from hocket.ir import Costs, Op
from hocket.profiling.hill_climb import HillClimb, Setting

if TYPE_CHECKING:
    from rich.table import Table as RichTable


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

    Returns:
        The accuracy, or NaN if all of these widths were measured.
    """
    judged = [width for width in (actual_us if widths is None else widths) if width not in found.times_us]
    if not judged:
        return math.nan
    return 1 - fmean(abs(found.predict_us(width) - actual_us[width]) / actual_us[width] for width in judged)


SAMPLES = (1, 4, 8, 16)
INTERVALS = (2, 4, 8, 16)

PAPER_TABLE_IV = {  # samples -> accuracy and R² of each of MODELS
    1: ((0.61, 0.56, 0.37, 0.27, 0.18), (0.961, 0.818, 0.779, 0.981, 0.196)),
    4: ((0.57, 0.67, 0.17, 0.21, 0.14), (0.957, 0.592, 0.539, 0.951, 0.175)),
    8: ((0.51, 0.56, 0.26, 0.31, 0.18), (0.972, 0.589, 0.965, 0.977, 0.177)),
    16: ((0.34, 0.26, 0.13, 0.14, 0.11), (0.959, 0.585, 0.852, 0.892, 0.159)),
}
PAPER_TABLE_V = {  # model -> accuracy at each of INTERVALS
    "ResNet-50": (0.9813, 0.9545, 0.8342, 0.3112),
    "DCGAN": (0.9716, 0.9443, 0.5154, 0.1014),
    "Inception-v3": (0.9791, 0.9422, 0.7321, 0.2121),
    "LSTM": (0.9556, 0.9045, 0.4134, 0.1103),
}


@dataclass(frozen=True)
class RegressionRow:
    """A row of Table IV: one metric of all models at one number of samples. `paper` is what the paper has there."""

    samples: int
    metric: str
    values: Mapping[str, float]
    paper: tuple[float, ...]

    def cells(self) -> list[str]:
        form = "{:.0%}" if self.metric == "accuracy" else "{:.3f}"
        pairs = zip(self.values.values(), self.paper, strict=False)
        return [str(self.samples), self.metric, *(f"{form.format(a)} ({form.format(b)})" for a, b in pairs)]


@dataclass(frozen=True)
class ClimbRow:
    """A row of Table V: how well climbs at one interval predict a set of curves, and what they choose.

    Attributes:
        name: of the set.
        interval: threads added a step.
        accuracy: mean over the ops, over all widths that were not measured.
        climbed: the same, over the widths up to where each climb ended.
        paper: the accuracy in the paper. NaN where it has none.
        mean_loss: by how much the choices are slower than the true best widths, in the mean over the ops.
        worst_loss: the same, of the worst choice.
        num_steps: training steps until the last climb has ended.
    """

    name: str
    interval: int
    accuracy: float
    climbed: float
    paper: float
    mean_loss: float
    worst_loss: float
    num_steps: int

    def cells(self) -> list[str]:
        shares = (self.accuracy, self.climbed, self.paper, self.mean_loss, self.worst_loss)
        shown = ("" if math.isnan(share) else f"{share:.2%}" for share in shares)
        return [self.name, str(self.interval), *shown, str(self.num_steps)]


@dataclass(frozen=True)
class Table:
    """Rows under a header. ``rich.print(table)`` shows it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[Any, ...]

    def __rich__(self) -> RichTable:
        from hocket.cli.console import table

        return table(self.title, self.header, [row.cells() for row in self.rows])


def table_iv(
    curves: Curves | None = None,
    *,
    test: Curves | None = None,
    models: Sequence[str] = MODELS,
    samples: Sequence[int] = SAMPLES,
    widths: Iterable[int] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Table:
    """Accuracy and R² of the regression models by the number of sampled widths, the paper's in parentheses.

    Arguments are those of `evaluate`, and noise on all times."""
    used = published_knl() if curves is None else curves
    if noise:
        used, test = used.noisy(noise, seed), test and test.noisy(noise, seed + 1)
    wanted = None if widths is None else tuple(widths)
    rows = []
    for n in samples:
        scores = [evaluate(used, model, n, test=test, widths=wanted, seed=seed) for model in models]
        paper = PAPER_TABLE_IV.get(n, ((), ()))
        for at, metric in enumerate(Score._fields):
            published = dict(zip(MODELS, paper[at], strict=False))
            values = {model: score[at] for model, score in zip(models, scores, strict=True)}
            rows.append(RegressionRow(n, metric, values, tuple(published.get(model, math.nan) for model in models)))
    words = f", times with {noise:.0%} noise" if noise else ""
    return Table(
        f"Regression{words} (in parentheses: the paper, on its data)", ("samples", "metric", *models), tuple(rows)
    )


def table_v(
    sets: Mapping[str, Curves] | None = None,
    *,
    intervals: Sequence[int] = INTERVALS,
    also: Iterable[int] | None = None,
    tolerance: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Table:
    """Accuracy of hill climbing by interval, and what its choices lose.

    `also` and `tolerance` are those of `HillClimb`; with ``()`` it is the paper's method to the letter. The climbs see
    times with the noise, and are judged by those without."""
    widths = None if also is None else tuple(also)
    rows = []
    for name, smooth in ({"published curves": published_knl()} if sets is None else sets).items():
        seen = smooth.noisy(noise, seed) if noise else smooth
        for at, interval in enumerate(intervals):
            paper = PAPER_TABLE_V.get(name, ()) if tuple(intervals) == INTERVALS else ()
            published = paper[at] if paper else math.nan
            rows.append(_climb_row(name, published, smooth, seen, interval, widths, tolerance))
    header = ("ops of", "x", "accuracy", "climbed", "paper", "mean loss", "worst", "steps")
    words = f", times with {noise:.0%} noise" if noise else ""
    return Table(f"Hill climbing{words}", header, tuple(rows))


def _climb_row(
    name: str,
    paper: float,
    smooth: Curves,
    seen: Curves,
    interval: int,
    also: tuple[int, ...] | None,
    tolerance: float,
) -> ClimbRow:
    everywhere, climbed, losses, num_steps = [], [], [], 0
    for actual, curve in zip(smooth, seen, strict=True):
        cores_per_cache = smooth.cores // len(actual.scatter_us) if actual.scatter_us else 1
        found = climb(
            curve.time_us, smooth.cores, interval, cores_per_cache=cores_per_cache, also=also, tolerance=tolerance
        )
        everywhere.append(accuracy(found, actual.best_us))
        climbed.append(accuracy(found, actual.best_us, range(1, found.path[-1] + 1)))
        losses.append(actual.best_us[found.best_width] / min(actual.best_us.values()) - 1)
        num_steps = max(num_steps, found.num_steps)
    shares = (_mean(everywhere), _mean(climbed), paper, _mean(losses), max(losses))
    return ClimbRow(name, interval, *shares, num_steps)


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
