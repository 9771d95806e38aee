"""Regression, the paper's first performance model, and the tables that compare it with hill climbing.

What an op is (its flops and bytes, events of the hardware counters where the machine offers them) and its times at N
sampled widths should tell its time at any other width. So one regressor is trained for each width to be predicted
(one for all of them comes down to 25% accuracy), on ops that are known at every width, and asked about ops that are
not among them (Liu et al., IPDPS 2019, section III-B and Table IV).

In the paper R² is good, since the few large ops are predicted well, and accuracy is not: one model has to fit times
that span five orders of magnitude, and counters of short ops are unreliable. A climb knows no other op and no machine
and needs no training, so hill climbing is what the planner uses. On curves that were built from a formula (as
`published_knl`'s) regression looks better than it is: a formula is easily learnt. Table IV is worth reproducing on
recorded curves.

``table_iv()`` and ``table_v()`` print with rich. Scikit-learn does the regression and is an extra (``models``).
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.curves import Curve, Curves
from benchmarks.knl import published_knl
from hocket.errors import InputError, MissingDependencyError
from hocket.profiling.hill_climb import accuracy, climb

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["INTERVALS", "MODELS", "SAMPLES", "Regression", "Score", "Table", "evaluate", "table_iv", "table_v", "train"]

MODELS = ("Gradient Boosting", "K-Neighbors", "TSR", "OLS", "PAR")
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

Counters = Mapping[str, Mapping[str, float]]  # shape of a curve -> event -> count per instruction


class Score(NamedTuple):
    """Accuracy is one minus the mean of |predicted - actual| / actual, and may be far below zero."""

    accuracy: float
    r2: float


@dataclass(frozen=True)
class Regression:
    """Trained regressors: one for each width that was not sampled.

    Attributes:
        sampled: the widths whose times are features.
        events: the counters that are features, in order.
        models: width -> fitted scikit-learn model.
    """

    sampled: tuple[int, ...]
    events: tuple[str, ...]
    models: Mapping[int, Any]

    def predict_us(self, curves: Sequence[Curve], width: int, counters: Counters | None = None) -> list[float]:
        """Predicted microseconds of each of `curves` at `width`, of which only the sampled widths are looked at."""
        if width in self.sampled:
            return [curve.best_us[width] for curve in curves]
        if width not in self.models:
            raise InputError(f"regression: not trained for width {width}; for {', '.join(map(str, self.models))}")
        rows = [_features(curve, self.sampled, self.events, counters) for curve in curves]
        return [float(value) for value in self.models[width].predict(rows)]


def train(
    curves: Iterable[Curve],
    model: str,
    n: int,
    *,
    widths: Iterable[int] | None = None,
    counters: Counters | None = None,
    seed: int = 0,
) -> Regression:
    """Train one of `MODELS` on ops that are known at every width.

    Args:
        curves: the ops.
        model: one of `MODELS`.
        n: how many widths are sampled, spread evenly over the cores.
        widths: which widths to be able to predict; all that are not sampled when not given.
        counters: events of the hardware counters, if the machine has them.
        seed: of the models that draw random numbers.

    Raises:
        InputError: an unknown model, more samples than widths, no curves, or an op without its counters.
        MissingDependencyError: scikit-learn is not installed.
    """
    known = list(curves)
    if not known:
        raise InputError("regression: no curves to train on")
    cores = len(known[0].compact_us)
    sampled = sampled_widths(n, cores)
    events = tuple(sorted({event for counts in (counters or {}).values() for event in counts}))
    rows = [_features(curve, sampled, events, counters) for curve in known]
    models = {}
    for width in range(1, cores + 1) if widths is None else widths:
        if width not in sampled:
            actual = [curve.best_us[width] for curve in known]
            regressor = _regressor(model, len(known), seed)
            models[width] = _fitted(regressor, rows, actual)
    return Regression(sampled, events, models)


def evaluate(
    curves: Curves,
    model: str,
    n: int,
    *,
    test: Curves | None = None,
    widths: Iterable[int] | None = None,
    counters: Counters | None = None,
    seed: int = 0,
) -> Score:
    """How well `model` predicts ops it was not trained on, over all widths that were not sampled.

    Args:
        curves: the ops to train on, and to test on unless `test` is given: then a quarter, drawn with `seed`, is held
            out. An op is in one part with all its widths.
        model: one of `MODELS`.
        n: how many widths are sampled.
        test: the ops to test on; the paper trains on three networks and tests on DCGAN.
        widths: as for `train`.
        counters: as for `train`.
        seed: as for `train`, and of the split.

    Example:
        >>> from benchmarks.knl import published_knl
        >>> score = evaluate(published_knl(), "K-Neighbors", 4, widths=[10, 50])
        >>> score.r2 > score.accuracy
        True
    """
    known, asked = list(curves), list(test or ())
    if test is None:
        random.Random(seed).shuffle(known)
        asked, known = known[: len(known) // 4], known[len(known) // 4 :]
    if not asked:
        raise InputError("regression: no op left to test on")
    trained = train(known, model, n, widths=widths, counters=counters, seed=seed)
    pairs: list[tuple[float, float]] = []
    for width in trained.models:
        predicted = trained.predict_us(asked, width, counters)
        pairs += zip(predicted, (curve.best_us[width] for curve in asked), strict=True)
    if not pairs:
        raise InputError("regression: no width left to test on: all of them are sampled")
    mean_us = fmean(actual for _, actual in pairs)
    residual = math.fsum((predicted - actual) ** 2 for predicted, actual in pairs)
    total = math.fsum((actual - mean_us) ** 2 for _, actual in pairs)
    error = fmean(abs(predicted - actual) / actual for predicted, actual in pairs)
    return Score(1 - error, 1 - residual / total if total else math.nan)


def sampled_widths(n: int, cores: int) -> tuple[int, ...]:
    """`n` widths, each in the middle of one of `n` equal parts of the cores."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= cores:
        raise InputError(f"regression: expected from 1 to {cores} sampled widths, got {n!r}")
    return tuple(math.ceil((part + 0.5) * cores / n) for part in range(n))


def _features(curve: Curve, sampled: Sequence[int], events: Sequence[str], counters: Counters | None) -> list[float]:
    plain = [curve.flops, curve.size_bytes, *(curve.best_us[width] for width in sampled)]
    counts = (counters or {}).get(curve.shape, {})
    missing = [event for event in events if event not in counts]
    if missing:
        raise InputError(f"regression: op {curve.op_type} {curve.shape} has no counter {', '.join(missing)}")
    return [*plain, *(counts[event] for event in events)]


def _fitted(regressor: Any, rows: list[list[float]], actual_us: list[float]) -> Any:
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Passive-aggressive steps need not settle; how good they are is what is being measured.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return regressor.fit(rows, actual_us)


def _regressor(model: str, num_ops: int, seed: int) -> Any:
    """A fresh model behind a scaler: features range from microseconds to 10^11 flops."""
    if model not in MODELS:
        raise InputError(f"regression: unknown model {model!r}; one of {', '.join(MODELS)}")
    try:
        from sklearn.ensemble import GradientBoostingRegressor
        from sklearn.linear_model import LinearRegression, SGDRegressor, TheilSenRegressor
        from sklearn.neighbors import KNeighborsRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "models", "a regression model of op times") from error
    models = {
        "Gradient Boosting": lambda: GradientBoostingRegressor(random_state=seed),
        "K-Neighbors": lambda: KNeighborsRegressor(n_neighbors=min(5, num_ops)),
        "TSR": lambda: TheilSenRegressor(random_state=seed, max_subpopulation=1000),
        "OLS": lambda: LinearRegression(),
        # What scikit-learn says PassiveAggressiveRegressor, which is going away, is to be replaced with.
        "PAR": lambda: SGDRegressor(
            loss="epsilon_insensitive", penalty=None, learning_rate="pa1", eta0=1.0, random_state=seed
        ),
    }
    return make_pipeline(StandardScaler(), models[model]())


# ------------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class RegressionRow:
    """A row of Table IV: one metric of all models at one number of samples; `paper` is what the paper has there."""

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
        paper: the accuracy in the paper; NaN where it has none.
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
        paper = "" if math.isnan(self.paper) else f"{self.paper:.2%}"
        shares = (
            f"{self.accuracy:.2%}",
            f"{self.climbed:.2%}",
            paper,
            f"{self.mean_loss:.2%}",
            f"{self.worst_loss:.2%}",
        )
        return [self.name, str(self.interval), *shares, str(self.num_steps)]


@dataclass(frozen=True)
class Table:
    """Rows under a header; ``rich.print(table)`` shows it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[Any, ...]

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row.cells())
        return table


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

    Args:
        curves: as for `evaluate`; `published_knl` when not given.
        test: as for `evaluate`.
        models: the columns.
        samples: the rows.
        widths: as for `evaluate`.
        noise: train and test on times with this noise.
        seed: of all that is random.
    """
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

    Args:
        sets: name -> the ops of a network; `published_knl` when not given.
        intervals: threads added a step.
        also: as for `hill_climb.HillClimb`; ``()`` is the paper's method to the letter.
        tolerance: as for `hill_climb.HillClimb`.
        noise: the climbs see times with this noise, and are judged by those without.
        seed: of the noise.
    """
    widths = None if also is None else tuple(also)
    rows = []
    for name, smooth in ({"published curves": published_knl()} if sets is None else sets).items():
        seen = smooth.noisy(noise, seed) if noise else smooth
        for at, interval in enumerate(intervals):
            paper = PAPER_TABLE_V.get(name, ()) if tuple(intervals) == INTERVALS else ()
            row = _climb_row(smooth, seen, interval, widths, tolerance)
            rows.append(replace(row, name=name, paper=paper[at] if paper else math.nan))
    header = ("ops of", "x", "accuracy", "climbed", "paper", "mean loss", "worst", "steps")
    words = f", times with {noise:.0%} noise" if noise else ""
    return Table(f"Hill climbing{words}", header, tuple(rows))


def _climb_row(smooth: Curves, seen: Curves, interval: int, also: tuple[int, ...] | None, tolerance: float) -> ClimbRow:
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
    return ClimbRow(
        name="",
        interval=interval,
        accuracy=_mean(everywhere),
        climbed=_mean(climbed),
        paper=math.nan,
        mean_loss=_mean(losses),
        worst_loss=max(losses),
        num_steps=num_steps,
    )


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
