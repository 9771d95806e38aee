"""Curves of a Knights Landing, built from published figures; nothing here was recorded.

Liu et al. (IPDPS 2019) measured on a Xeon Phi 7250: 68 cores, 4 hardware threads each, 2 cores to a cache. Their Table
II gives for nine convolutions the width at which each is fastest, its time there, and how much slower it is at 68
threads. With p threads a convolution of w microseconds of work at one thread takes::

    t(p) = launch + ((w/p)^4 + floor^4)^(1/4) + spawn * p + crowd * max(0, p - best)

The three figures of a row fix `w`, `floor` and `spawn`; `crowd` is 0 unless even without a floor the loss at 68 threads
is too small. For the other ops only that loss is published (Table VI), and no width::

    t(p) = launch + w / min(p, best) + t(best) * loss * max(0, p - best) / 67

with `best` from `w` by the power law through the nine rows. docs/models.md has each assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import linear_regression

import numpy as np

from benchmarks.curves import BYTES_PER_S, FLOPS_PER_S, Curve, Curves

CORES, LAUNCH_US, SHARPNESS = 68, 10.0, 4
CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@dataclass(frozen=True)
class _Row:
    """A row of Table II: an op's best width, its time there, and by how much 68 threads are slower."""

    op_type: str
    shape: str
    best_us: float
    best_width: int
    loss: float
    ratio_34: float | None = None  # time at 34 threads over that at 68: Table III's "performance loss"


TABLE_II = (
    _Row("Conv2DBackpropFilter", "32x8x8x384", 7200.0, 26, 0.173),
    _Row("Conv2DBackpropFilter", "32x17x17x384", 11100.0, 42, 0.102),
    _Row("Conv2DBackpropFilter", "32x8x8x2048", 20300.0, 68, 0.0, ratio_34=1.25),
    _Row("Conv2DBackpropInput", "32x8x8x384", 5800.0, 36, 0.098),
    _Row("Conv2DBackpropInput", "32x17x17x384", 8700.0, 56, 0.023),
    _Row("Conv2DBackpropInput", "32x8x8x2048", 19600.0, 68, 0.0, ratio_34=1.17),
    _Row("Conv2D", "32x8x8x384", 4700.0, 45, 0.111),
    _Row("Conv2D", "32x17x17x384", 7400.0, 63, 0.035),
    _Row("Conv2D", "32x8x8x2048", 14800.0, 66, 0.020),
)

# Table VI: by which share an op is slower at 68 threads than with strategies 1 and 2, for a small and a large instance.
# Small ones are LSTM's, large ones those of the image models; where only one is published it stands for both.
TABLE_VI = {
    "MatMul": (0.02, 0.02),  # LSTM
    "Mul": (0.25, 0.03),  # LSTM; ResNet-50
    "AddN": (0.17, 0.03),  # LSTM; as ResNet-50's Mul
    "FusedBatchNorm": (0.03, 0.03),  # DCGAN
    "AvgPool": (0.04, 0.04),  # Inception-v3
    "MaxPooling": (0.08, 0.08),  # Inception-v3
    "SparseSoftmaxCross": (0.34, 0.34),  # LSTM
    "BiasAddGrad": (0.03, 0.17),  # LSTM; DCGAN
    "ApplyAdam": (0.17, 0.17),  # DCGAN
    "Tile": (0.015, 0.015),  # ResNet-50 1.02, Inception-v3 1.01
}
SMALL_US, LARGE_US = 5.0, 500.0  # of work: 30 KB and 3 MB, the tensors of an LSTM cell and of ResNet-50 on CIFAR-10
GRID_US = tuple(4.0**power for power in range(12))


def published_knl(cores: int = CORES) -> Curves:
    """Curves of a Knights Landing of 68 cores, built from published figures, as the module's docstring says.

    Fewer cores are the first ones of the same machine: 16 is "the same model at 16 cores", not a Xeon.

    Example:
        >>> curve = published_knl().curves[0]
        >>> curve.op_type, curve.shape, min(curve.best_us, key=curve.best_us.get)
        ('Conv2DBackpropFilter', '32x8x8x384', 26)
    """
    return _published().narrowed(cores)


@cache
def _published() -> Curves:
    rows = [(row, _fitted(row)) for row in TABLE_II]
    law = linear_regression([math.log(w) for _, (w, _) in rows], [math.log(row.best_width) for row, _ in rows])
    curves = [_curve(row.op_type, row.shape, w, _convolution(w, row.best_width, row.loss, y)) for row, (w, y) in rows]
    for kind in CONVOLUTIONS:
        known = [(w, row.best_width, row.loss) for row, (w, _) in rows if row.op_type == kind]
        curves += [_curve(kind, f"{w:g}us", w, _convolution(w, *_between(w, known, law.slope))) for w in GRID_US]
    for kind, (small, large) in TABLE_VI.items():
        for w in GRID_US:
            best_width = min(max(round(math.exp(law.intercept) * w**law.slope), 1), CORES)
            loss = float(np.interp(math.log(w), np.log((SMALL_US, LARGE_US)), (small, large)))
            curves.append(_curve(kind, f"{w:g}us", w, _capped(w, best_width, loss)))
    note = (
        "Built from published figures, not recorded: Liu et al., IPDPS 2019, Tables II, III and VI, on a Xeon Phi "
        "7250 of 68 cores; each time is that of the better affinity. Construction and assumptions: docs/models.md"
    )
    return Curves(tuple(curves), note, "published")


def _fitted(row: _Row) -> tuple[float, float]:
    """The work of a row's op, and what share of its best time spawning has (1 where the floor is 0)."""

    def height(y: float) -> float:
        return (row.best_us - LAUNCH_US) / (1 + y)

    other, ratio = (34, row.ratio_34) if row.ratio_34 else (CORES, 1 + row.loss)
    y = _share(row.best_width, other, ratio, height)
    return row.best_width * y ** (1 / SHARPNESS) * height(y), y


def _convolution(w: float, best_width: float, loss: float, y: float | None = None) -> list[float]:
    """Times at 1 to 68 threads of `w` microseconds of work, fastest at `best_width` and slower by `loss` at 68."""
    if best_width > CORES - 1 and y is None:  # it would like more threads than there are: no floor, no crowd
        return [LAUNCH_US + w / p + w * p / best_width**2 for p in range(1, CORES + 1)]

    def height(y: float) -> float:
        return w / (best_width * y ** (1 / SHARPNESS))

    if y is None:
        y = _share(best_width, CORES, 1 + loss, height)
    times = [LAUNCH_US + height(y) * _relative(best_width, y, p) for p in range(1, CORES + 1)]
    missing = (1 + loss) * (LAUNCH_US + height(y) * (1 + y)) - times[-1]
    if missing > 0 and best_width < CORES:
        times = [t + missing * max(0.0, p - best_width) / (CORES - best_width) for p, t in enumerate(times, 1)]
    return times


def _relative(best_width: float, y: float, p: float) -> float:
    """Time at `p` threads in units of what work and floor take at `best_width`, where spawning takes `y` of these."""
    divided = y * (best_width / p) ** SHARPNESS
    return (divided + 1 - y) ** (1 / SHARPNESS) + y * p / best_width


def _share(best_width: float, other: int, ratio: float, height: Callable[[float], float]) -> float:
    """Return the `y` at which the time at `other` threads is `ratio` times the best, or 1 if there is none."""

    def found(y: float) -> float:
        best_us = LAUNCH_US + height(y) * (1 + y)
        return (LAUNCH_US + height(y) * _relative(best_width, y, other)) / best_us

    low, high = 1e-12, 1.0
    if found(high) < ratio:
        return high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < ratio else (low, middle)
    return high


def _capped(w: float, best_width: int, loss: float) -> list[float]:
    """Perfect scaling up to `best_width`, and from there a straight line."""
    rise_us = (LAUNCH_US + w / best_width) * loss / (CORES - 1)
    return [LAUNCH_US + w / min(p, best_width) + rise_us * max(0, p - best_width) for p in range(1, CORES + 1)]


def _between(w: float, rows: list[tuple[float, int, float]], slope: float) -> tuple[float, float]:
    """Best width and loss of a convolution of another size: between the rows, beyond them by the power law."""
    works, widths, losses = zip(*rows, strict=True)
    loss = float(np.interp(math.log(w), np.log(works), losses))
    nearest = min(max(w, works[0]), works[-1])
    width = math.exp(np.interp(math.log(nearest), np.log(works), np.log(widths)))
    return (max(1.0, width * (w / nearest) ** slope) if w != nearest else width), loss


def _curve(kind: str, shape: str, w: float, times_us: list[float]) -> Curve:
    """Sizes to four digits, so that a file stays small. Flops and bytes are those whose work is `w`."""
    if kind in CONVOLUTIONS or kind == "MatMul":
        flops = w * FLOPS_PER_S / 1e6
        size_bytes = flops / 50  # about what the convolutions of ResNet-50 and Inception-v3 have
    else:
        size_bytes = w * BYTES_PER_S / 1e6
        flops = size_bytes / 12  # two floats read and one written for each operation
    rounded = tuple(float(f"{time_us:.7g}") for time_us in times_us)
    return Curve(kind, shape, float(f"{flops:.4g}"), float(f"{size_bytes:.4g}"), rounded)
