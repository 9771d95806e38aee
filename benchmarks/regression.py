"""Regression, the paper's first performance model.

The flops and bytes of an op and its times at N sampled widths should predict its time at any other width. So one
regressor is trained for each width to be predicted (one for all of them reaches only 25% accuracy), on ops that are
known at every width, and tested on other ops (Liu et al., IPDPS 2019, section III-B and Table IV).

In the paper R² is good, since the few large ops are predicted well, and accuracy is not: one model has to fit times
that span five orders of magnitude. A climb knows no other op and no machine
and needs no training, so hill climbing is what the planner uses. On curves that were built from a formula (as
`published_knl`'s) regression looks better than it is: a formula is easily learnt. Table IV is worth reproducing on
recorded curves.

Scikit-learn does the regression and is an extra (``models``). `benchmarks.regression_tables` has the tables.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.curves import Curve, Curves
from hocket.errors import InputError, MissingDependencyError

MODELS = ("Gradient Boosting", "K-Neighbors", "TSR", "OLS", "PAR")


class Score(NamedTuple):
    """Accuracy is one minus the mean of |predicted - actual| / actual, and may be far below zero."""

    accuracy: float
    r2: float


@dataclass(frozen=True)
class Regression:
    """Trained regressors: one for each width that was not sampled.

    Attributes:
        sampled: the widths whose times are features.
        models: width -> fitted scikit-learn model.
    """

    sampled: tuple[int, ...]
    models: Mapping[int, Any]

    def predict_us(self, curves: Sequence[Curve], width: int) -> list[float]:
        """Predicted microseconds of each of `curves` at `width`, of which only the sampled widths are looked at."""
        if width in self.sampled:
            return [curve.best_us[width] for curve in curves]
        if width not in self.models:
            raise InputError(f"regression: not trained for width {width}; for {', '.join(map(str, self.models))}")
        rows = [_features(curve, self.sampled) for curve in curves]
        return [float(value) for value in self.models[width].predict(rows)]


def train(
    curves: Iterable[Curve],
    model: str,
    n: int,
    *,
    widths: Iterable[int] | None = None,
    seed: int = 0,
) -> Regression:
    """Train one of `MODELS` on ops that are known at every width, to predict these widths by `n` sampled ones.

    Raises:
        InputError: an unknown model, more samples than widths, no curves.
        MissingDependencyError: scikit-learn is not installed.
    """
    known = list(curves)
    if not known:
        raise InputError("regression: no curves to train on")
    cores = len(known[0].compact_us)
    sampled = sampled_widths(n, cores)
    rows = [_features(curve, sampled) for curve in known]
    models = {}
    for width in range(1, cores + 1) if widths is None else widths:
        if width not in sampled:
            actual = [curve.best_us[width] for curve in known]
            regressor = _regressor(model, len(known), seed)
            models[width] = _fitted(regressor, rows, actual)
    return Regression(sampled, models)


def evaluate(
    curves: Curves,
    model: str,
    n: int,
    *,
    test: Curves | None = None,
    widths: Iterable[int] | None = None,
    seed: int = 0,
) -> Score:
    """How well `model` predicts ops it was not trained on, over all widths that were not sampled.

    Args:
        curves: the ops to train on, and to test on unless `test` is given: then a quarter, drawn with `seed`, is held
            out. An op is in one part with all its widths.
        model: one of `MODELS`.
        n: how many widths are sampled.
        test: the ops to test on. The paper trains on three networks and tests on DCGAN.
        widths: as for `train`.
        seed: as for `train`, and of the split.

    Example:
        >>>         >>> score = evaluate(published_knl(), "K-Neighbors", 4, widths=[10, 50])
        >>> score.r2 > score.accuracy
        True
    """
    known, asked = list(curves), list(test or ())
    if test is None:
        random.Random(seed).shuffle(known)
        asked, known = known[: len(known) // 4], known[len(known) // 4 :]
    if not asked:
        raise InputError("regression: no op left to test on")
    trained = train(known, model, n, widths=widths, seed=seed)
    pairs: list[tuple[float, float]] = []
    for width in trained.models:
        predicted = trained.predict_us(asked, width)
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


def _features(curve: Curve, sampled: Sequence[int]) -> list[float]:
    return [curve.flops, curve.size_bytes, *(curve.best_us[width] for width in sampled)]


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
