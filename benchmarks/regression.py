"""Tables IV and V of Liu et al. (IPDPS 2019): regression models by samples, hill climbing by interval.

``rich.print(table_iv())`` and ``rich.print(table_v())`` show them. docs/models.md has them, and what they say.

Regression, the paper's first performance model, predicts the time of an op at a width from its flops and bytes and its
times at N sampled widths. One regressor is trained for each width to be predicted (one for all of them reaches only 25%
accuracy), on ops that are known at every width, and tested on other ops (section III-B and Table IV). Scikit-learn does
the regression and is an extra (``models``). Table V has hill climbs of single ops whose times are known.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.bench import table_of
from benchmarks.curves import Curve, Curves
from benchmarks.knl import published_knl
from hocket.ir import Costs, Op
from hocket.profiling.hill_climb import HillClimb, Setting

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("Gradient Boosting", "K-Neighbors", "TSR", "OLS", "PAR")
PAPER_TABLE_IV = {  # samples -> accuracy and R² of each of MODELS
    1: ((0.61, 0.56, 0.37, 0.27, 0.18), (0.961, 0.818, 0.779, 0.981, 0.196)),
    4: ((0.57, 0.67, 0.17, 0.21, 0.14), (0.957, 0.592, 0.539, 0.951, 0.175)),
    8: ((0.51, 0.56, 0.26, 0.31, 0.18), (0.972, 0.589, 0.965, 0.977, 0.177)),
    16: ((0.34, 0.26, 0.13, 0.14, 0.11), (0.959, 0.585, 0.852, 0.892, 0.159)),
}
INTERVALS = (2, 4, 8, 16)
PAPER_TABLE_V = {  # model -> accuracy at each of INTERVALS
    "ResNet-50": (0.9813, 0.9545, 0.8342, 0.3112),
    "DCGAN": (0.9716, 0.9443, 0.5154, 0.1014),
    "Inception-v3": (0.9791, 0.9422, 0.7321, 0.2121),
    "LSTM": (0.9556, 0.9045, 0.4134, 0.1103),
}


def scores(
    known: Sequence[Curve], asked: Sequence[Curve], model: str, n: int, widths: Iterable[int] | None, seed: int
) -> tuple[float, float]:
    """Accuracy (which may be far below zero) and R² of `model` on ops that it was not trained on.

    It knows `n` sampled widths, and predicts all others, or these `widths`.
    """
    from sklearn.exceptions import ConvergenceWarning

    cores = len(known[0].times_us)
    # Each in the middle of one of `n` equal parts of the cores.
    sampled = [math.ceil((part + 0.5) * cores / n) for part in range(n)]

    def features(curves: Sequence[Curve]) -> list[list[float]]:
        return [[curve.flops, curve.size_bytes, *(curve.best_us[width] for width in sampled)] for curve in curves]

    pairs: list[tuple[float, float]] = []
    for width in widths or range(1, cores + 1):
        if width not in sampled:
            with warnings.catch_warnings():
                # Passive-aggressive steps need not settle; how good they are is what is being measured.
                warnings.simplefilter("ignore", ConvergenceWarning)
                fitted = _regressor(model, len(known), seed).fit(
                    features(known), [curve.best_us[width] for curve in known]
                )
            actual = [curve.best_us[width] for curve in asked]
            pairs += zip(map(float, fitted.predict(features(asked))), actual, strict=True)
    mean_us = fmean(actual for _, actual in pairs)
    residual = math.fsum((predicted - actual) ** 2 for predicted, actual in pairs)
    total = math.fsum((actual - mean_us) ** 2 for _, actual in pairs)
    return 1 - fmean(abs(predicted - actual) / actual for predicted, actual in pairs), 1 - residual / total


def _regressor(model: str, num_ops: int, seed: int) -> Any:
    """A fresh model behind a scaler: features range from microseconds to 10^11 flops."""
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, SGDRegressor, TheilSenRegressor
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # scikit-learn's replacement of PassiveAggressiveRegressor, which is deprecated.
    passive_aggressive = {"loss": "epsilon_insensitive", "penalty": None, "learning_rate": "pa1", "eta0": 1.0}
    models = {
        "Gradient Boosting": lambda: GradientBoostingRegressor(random_state=seed),
        "K-Neighbors": lambda: KNeighborsRegressor(n_neighbors=min(5, num_ops)),
        "TSR": lambda: TheilSenRegressor(random_state=seed, max_subpopulation=1000),
        "OLS": LinearRegression,
        "PAR": lambda: SGDRegressor(random_state=seed, **passive_aggressive),
    }
    return make_pipeline(StandardScaler(), models[model]())


def regressions(
    curves: Curves | None = None,
    *,
    test: Curves | None = None,
    models: Sequence[str] = MODELS,
    samples: Iterable[int] = tuple(PAPER_TABLE_IV),
    widths: Iterable[int] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Accuracy and R² of each model by the number of sampled widths, and the paper's, on its own data.

    Tested on is a quarter of the ops, drawn with `seed`, unless `test` has those to test on. The paper trains on three
    networks and tests on DCGAN. `noise` is the standard deviation of a factor on all times.
    """
    used = published_knl() if curves is None else curves
    if noise:
        used, test = used.noisy(noise, seed), test and test.noisy(noise, seed + 1)
    known = list(used)
    if test is None:
        random.Random(seed).shuffle(known)
    at = 0 if test else len(known) // 4
    for n in samples:
        found = [scores(known[at:], list(test or known[:at]), model, n, widths, seed) for model in models]
        for place, metric in enumerate(("accuracy", "R²")):
            published = dict(zip(MODELS, PAPER_TABLE_IV[n][place], strict=True))
            ours = {model: each[place] for model, each in zip(models, found, strict=True)}
            yield {"samples": n, "metric": metric, "ours": ours, "paper": {model: published[model] for model in models}}


def table_iv(curves: Curves | None = None, **options: Any) -> Table:
    """Show `regressions`, the paper's in parentheses."""
    rows = list(regressions(curves, **options))
    for row in rows:
        form = "{:.0%} ({:.0%})" if row["metric"] == "accuracy" else "{:.3f} ({:.3f})"
        row |= {model: form.format(value, row["paper"][model]) for model, value in row["ours"].items()}
    columns = {"samples": "{samples}", "metric": "{metric}", **{model: f"{{{model}}}" for model in rows[0]["ours"]}}
    return table_of(f"Regression {options.get('noise', 0):.0%} noise (in parentheses: the paper)", columns, rows)


@dataclass(frozen=True)
class Climb:
    """The result of a climb: the measured times by width, in the better affinity, and the training steps it took.

    `path` are the widths that the climb itself visited, in order.
    """

    times_us: Mapping[int, float]
    path: tuple[int, ...]
    num_steps: int

    @property
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

    def accuracy(self, actual_us: Mapping[int, float], widths: Iterable[int] | None = None) -> float:
        """Return one minus the mean of |predicted - actual| / actual over the widths that were not measured, or NaN."""
        judged = [width for width in (widths or actual_us) if width not in self.times_us]
        errors = [abs(self.predict_us(width) - actual_us[width]) / actual_us[width] for width in judged]
        return 1 - fmean(errors) if errors else math.nan


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
    return Climb(times_us, tuple(sorted({width for width, _ in measured(())})), len(samples_us))


def climbs(
    sets: Mapping[str, Curves] | None = None,
    *,
    also: Sequence[int] | None = None,
    tolerance: float = 0.0,
    noise: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Accuracy of hill climbing by interval, and what its choices lose.

    `also` and `tolerance` are those of `HillClimb`; with ``()`` it is the paper's method to the letter. The climbs see
    times with the noise, and are judged by those without: over all widths that were not measured (``accuracy``), and
    over those up to where each climb ended (``climbed``).
    """
    for name, smooth in ({"published curves": published_knl()} if sets is None else sets).items():
        seen = smooth.noisy(noise) if noise else smooth
        for interval, paper in zip(INTERVALS, PAPER_TABLE_V.get(name, [None] * len(INTERVALS)), strict=True):
            options: dict[str, Any] = {"also": also, "tolerance": tolerance}
            found = [climb(partial(_time_us, curve), smooth.cores, interval, **options) for curve in seen]
            pairs = [(each, curve.best_us) for each, curve in zip(found, smooth, strict=True)]
            losses = [actual[each.best_width] / min(actual.values()) - 1 for each, actual in pairs]
            yield {
                **{"name": name, "interval": interval, "paper": paper},
                "accuracy": _mean(each.accuracy(actual) for each, actual in pairs),
                "climbed": _mean(each.accuracy(actual, range(1, each.path[-1] + 1)) for each, actual in pairs),
                **{"mean_loss": fmean(losses), "worst_loss": max(losses)},
                "num_steps": max(each.num_steps for each in found),
            }


def _time_us(curve: Curve, width: int, _: str) -> float:
    return curve.best_us[width]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan  # each climb has measured all widths up to its end


def table_v(sets: Mapping[str, Curves] | None = None, **options: Any) -> Table:
    """Show `climbs`."""
    columns = {
        **{"ops of": "{name}", "x": "{interval}", "accuracy": "{accuracy:.2%}", "climbed": "{climbed:.2%}"},
        **{"paper": "{paper:.2%}", "mean loss": "{mean_loss:.2%}", "worst": "{worst_loss:.2%}", "steps": "{num_steps}"},
    }
    return table_of(f"Hill climbing {options or ''}", columns, climbs(sets, **options))
