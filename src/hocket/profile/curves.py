"""Many-core curves: the time of an op at every width, for machines that are not at hand.

Planning for 68 cores takes the time of every op at 1 to 68 threads. A big machine records it (``hocket profile`` there,
`Curves.recorded` here); where there is none, `published_knl` builds curves from the tables of Liu et al. ("Runtime
Concurrency Control and Operation Scheduling for High Performance Neural Network Training", IPDPS 2019), who measured
on a Knights Landing: 68 cores, 4 hardware threads each, 2 cores to a cache. Nothing in that set was recorded by us.

A convolution of w microseconds of work at one thread takes, at p threads::

    t(p) = launch + ((w/p)^4 + floor^4)^(1/4) + spawn * p + crowd * max(0, p - best)

work that divides, memory traffic or serial code that does not, threads that must be started and fed, and cores that
something else wants. Table II gives, per row, where this is least, how much it is there, and how much more it is at 68
threads; these three fix `w`, `floor` and `spawn`, and `crowd` is 0 unless even a floor of 0 rises too little. For all
other ops only the loss at 68 threads is published (Table VI), and no width::

    t(p) = launch + w / min(p, best) + what is lost at 68 threads * max(0, p - best) / (68 - best)

where `best` follows from `w` by the power law through the nine rows of Table II. Sizes other than the published ones
interpolate between these. docs/models.md tells each assumption, and what of the paper the curves do not reproduce.
"""

from __future__ import annotations

import math
import os
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import as_file, files
from itertools import pairwise
from statistics import linear_regression

from hocket.errors import FormatError, InputError
from hocket.ir import Costs, Graph, Op

__all__ = ["Curve", "Curves", "for_graph", "kind_of", "published_knl", "work_us"]

# One thread of a Xeon Phi 7250: what the convolutions of Table II reach with the kernels that Inception-v3 has on
# these inputs (see docs/models.md), and its share of the 400 GB/s that the vendor states for the on-package memory.
FLOPS_PER_S, BYTES_PER_S = 1.0e10, 5.9e9
CORES, LAUNCH_US, SHARPNESS = 68, 10.0, 4
CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@dataclass(frozen=True)
class Curve:
    """The time of one op at 1, 2, 3, ... threads.

    Attributes:
        op_type: a type of the paper, such as ``Conv2DBackpropFilter``; of a recorded op ``target:role``.
        shape: the input's sizes, or what else tells this op from others of its type; no white space.
        flops: floating-point operations.
        size_bytes: bytes read and written.
        compact_us: microseconds at each width from 1, with neighbouring threads in one cache; or the better of the
            two affinities, where a source tells no more than that.
        scatter_us: the same with each thread alone in its cache, for as many widths as there are caches.
    """

    op_type: str
    shape: str
    flops: float
    size_bytes: float
    compact_us: tuple[float, ...]
    scatter_us: tuple[float, ...] = ()

    def time_us(self, width: int, affinity: str = "compact") -> float:
        """The oracle that a hill climb asks."""
        times_us = self.scatter_us if affinity == "scatter" and self.scatter_us else self.compact_us
        return times_us[width - 1]

    @cached_property
    def best_us(self) -> dict[int, float]:
        """Width -> microseconds in the better affinity."""
        alone = (*self.scatter_us, *[math.inf] * len(self.compact_us))
        return {width: min(pair) for width, pair in enumerate(zip(self.compact_us, alone, strict=False), 1)}

    @property
    def work_us(self) -> float:
        return work_us(self.flops, self.size_bytes)


@dataclass(frozen=True)
class Curves:
    """Curves of many ops, and where they come from.

    Attributes:
        curves: all of the same number of widths.
        note: where the figures come from, in words.
        source: as in `Costs.sources`: ``published``, ``measured`` or ``analytic``.
    """

    curves: tuple[Curve, ...]
    note: str = ""
    source: str = "published"
    _by_type: dict[str, list[Curve]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if len({len(curve.compact_us) for curve in self.curves}) != 1:
            raise InputError("curves: expected at least one curve, all of the same number of widths")
        for curve in sorted(self.curves, key=lambda curve: curve.work_us):
            self._by_type.setdefault(curve.op_type, []).append(curve)

    def __iter__(self) -> Iterator[Curve]:
        return iter(self.curves)

    def __len__(self) -> int:
        return len(self.curves)

    @property
    def cores(self) -> int:
        """The widest width."""
        return len(self.curves[0].compact_us)

    def narrowed(self, cores: int) -> Curves:
        """The same ops on the first `cores` cores of the same machine."""
        if not 1 <= cores <= self.cores:
            raise InputError(f"curves: expected cores from 1 to {self.cores}, got {cores!r}")
        cut = [replace(c, compact_us=c.compact_us[:cores], scatter_us=c.scatter_us[:cores]) for c in self.curves]
        return replace(self, curves=tuple(cut))

    def noisy(self, share: float, seed: int = 0) -> Curves:
        """Every time multiplied by a number drawn around 1, with standard deviation `share` (and at least 0.1)."""
        rng = random.Random(seed)

        def shaken(times_us: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(time_us * max(0.1, rng.gauss(1.0, share)) for time_us in times_us)

        curves = [replace(c, compact_us=shaken(c.compact_us), scatter_us=shaken(c.scatter_us)) for c in self.curves]
        return replace(self, curves=tuple(curves), note=f"{self.note}; with noise of {share:.1%}, seed {seed}")

    def times_us(self, op: Op) -> tuple[tuple[float, ...], bool]:
        """The times of `op` at each width, and whether this very op is in the set.

        Between two sizes of its type, time is linear in the work; beyond the largest, proportional to it; below the
        smallest, that of the smallest.

        Raises:
            InputError: the set has no op of this type.
        """
        types = [name for name in (_type(op), op.target, kind_of(op)) if name in self._by_type]
        if not types:
            raise InputError(f"curves: no curve for op {op.name!r}, a {op.target} ({kind_of(op)})")
        curves = self._by_type[types[0]]
        wanted_us = work_us(op.flops, op.size_bytes)
        at = bisect_left(curves, wanted_us, key=lambda curve: curve.work_us)
        if at == len(curves):
            factor = wanted_us / curves[-1].work_us if curves[-1].work_us else 1.0
            return tuple(factor * time_us for time_us in curves[-1].best_us.values()), False
        high = curves[at]
        if at == 0 or high.work_us == wanted_us:
            return tuple(high.best_us.values()), high.work_us == wanted_us and types[0] == _type(op)
        low = curves[at - 1]
        share = (wanted_us - low.work_us) / (high.work_us - low.work_us)
        pairs = zip(low.best_us.values(), high.best_us.values(), strict=True)
        return tuple(a + share * (b - a) for a, b in pairs), False

    @staticmethod
    def recorded(graph: Graph, costs: Costs) -> Curves:
        """The curves of a graph's ops, each kind once, from costs that know every width from 1 to the widest.

        Raises:
            InputError: an op without costs, or with a width that is missing.
        """
        cores = max((int(key) for times in costs.durations_us.values() for key in times if key.isdecimal()), default=1)
        found: dict[tuple[str, float, float], Curve] = {}
        for op in graph.ops:
            kind = (_type(op), op.flops, op.size_bytes)
            if kind in found:
                continue
            times = costs.durations_us.get(op.name, {})
            missing = next((width for width in range(1, cores + 1) if str(width) not in times), None)
            if missing is not None:
                raise InputError(f"curves: op {op.name!r} has no duration at width {missing}")
            times_us = tuple(times[str(width)] for width in range(1, cores + 1))
            found[kind] = Curve(kind[0], op.name, op.flops, op.size_bytes, times_us)
        sources = {costs.sources.get(op.name, "measured") for op in graph.ops}
        return Curves(tuple(found.values()), costs.note, sources.pop() if len(sources) == 1 else "analytic")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Curves:
        """Read a ``hocket-costs/1`` file whose ops are named as `save` names them."""
        costs = Costs.load(path)
        found: dict[str, Curve] = {}
        for name, times in costs.durations_us.items():
            if list(times) != [str(width) for width in range(1, len(times) + 1)]:
                raise FormatError(str(path), f"durations_us[{name!r}]", "expected every width, from 1 on, in order")
            curve = _parsed(name, tuple(times.values()), str(path))
            if name.endswith(" scatter"):
                whole = name.removesuffix(" scatter")
                if whole not in found:
                    raise FormatError(str(path), f"durations_us[{name!r}]", f"expected {whole!r} before it")
                found[whole] = replace(found[whole], scatter_us=curve.compact_us)
            else:
                found[name] = curve
        return Curves(tuple(found.values()), costs.note, next(iter(costs.sources.values()), "measured"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-costs/1`` file; an op's name is ``type shape flops=... bytes=...``."""
        durations: dict[str, dict[str, float]] = {}
        for curve in self.curves:
            name = f"{curve.op_type} {curve.shape} flops={curve.flops!r} bytes={curve.size_bytes!r}"
            for suffix, times_us in (("", curve.compact_us), (" scatter", curve.scatter_us)):
                if times_us:
                    durations[name + suffix] = {str(width): time_us for width, time_us in enumerate(times_us, 1)}
        Costs(durations, sources=dict.fromkeys(durations, self.source), note=self.note).save(path)

    @staticmethod
    def shipped(name: str = "knl68-published") -> Curves:
        """A set that comes with Hocket: ``knl68-published`` is what `published_knl` builds."""
        with as_file(files("hocket.profile").joinpath("data", f"{name}.json")) as path:
            if not path.exists():
                raise InputError(f"curves: no set {name!r} is shipped; knl68-published is")
            return Curves.load(path)


def for_graph(graph: Graph, curves: Curves) -> Costs:
    """Costs of a graph's ops at every width of `curves`, each op taken from the curves of its type by its size.

    Raises:
        InputError: an op of a type that the set does not have.
    """
    kinds: dict[tuple[str, str, float, float], tuple[dict[str, float], bool]] = {}
    durations: dict[str, dict[str, float]] = {}
    sources: dict[str, str] = {}
    for op in graph.ops:
        kind = (op.target, op.role, op.flops, op.size_bytes)
        if kind not in kinds:
            times_us, exact = curves.times_us(op)
            kinds[kind] = {str(width): time_us for width, time_us in enumerate(times_us, 1)}, exact
        durations[op.name], exact = kinds[kind]
        sources[op.name] = curves.source if exact or curves.source != "measured" else "analytic"
    return Costs(durations, sources=sources, note=curves.note)


def work_us(flops: float, size_bytes: float) -> float:
    """The size of an op, by which ops of one type compare: its time at one thread of a Xeon Phi, by the roofline."""
    return max(flops / FLOPS_PER_S, size_bytes / BYTES_PER_S) * 1e6


def kind_of(op: Op) -> str:
    """Which type of the paper an op stands for; what fits none is a ``Mul``, as any elementwise op."""
    target = op.target.removeprefix("aten.")
    if target.startswith("convolution_backward"):
        return {"activation_grad": "Conv2DBackpropInput", "bias_grad": "BiasAddGrad"}.get(
            op.role, "Conv2DBackpropFilter"
        )
    if "convolution" in target:
        return "Conv2D"
    for kind, words in _WORDS.items():
        if any(target.startswith(word) for word in words):
            return kind
    return "ApplyAdam" if op.role == "update" else "AddN" if target.startswith("add") else "Mul"


_WORDS = {
    "MatMul": ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_rnn_layer", "_scaled_dot_product"),
    "FusedBatchNorm": ("native_batch_norm", "native_layer_norm", "native_group_norm", "_native_batch_norm"),
    "MaxPooling": ("max_pool",),
    "AvgPool": ("avg_pool", "_adaptive_avg_pool", "mean"),
    "SparseSoftmaxCross": ("_log_softmax", "_softmax", "nll_loss", "binary_cross_entropy", "cross_entropy"),
    "BiasAddGrad": ("sum", "linalg_vector_norm", "_foreach_norm"),
    "Tile": ("cat", "stack", "clone", "copy", "embedding", "index", "gather", "empty", "zeros", "new_", "full", "ones"),
}


def _type(op: Op) -> str:
    return f"{op.target}:{op.role}"


def _parsed(name: str, times_us: tuple[float, ...], source: str) -> Curve:
    words = name.removesuffix(" scatter").split(" ")
    try:
        op_type, shape, flops, size = words
        numbers = float(flops.removeprefix("flops=")), float(size.removeprefix("bytes="))
    except ValueError:
        message = "expected a name such as 'Conv2D 32x8x8x384 flops=1e9 bytes=1e7'"
        raise FormatError(source, f"durations_us[{name!r}]", message) from None
    return Curve(op_type, shape, *numbers, times_us)


# ------------------------------------------------------------------------------------- published figures


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

# Table VI: by how much an op is slower at 68 threads than with strategies 1 and 2, for a small and a large instance.
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
GRID_US = tuple(4.0**power for power in range(-1, 13))


def published_knl(cores: int = CORES, *, noise: float = 0.0, seed: int = 0) -> Curves:
    """Curves of a Knights Landing of 68 cores, built from published figures; see the head of this file.

    Args:
        cores: fewer than 68 for the first cores of the same machine: 16 is "the same model at 16 cores", not a Xeon.
        noise: standard deviation of a factor on every time; 0 for smooth curves.
        seed: of the noise.

    Example:
        >>> curve = published_knl().curves[0]
        >>> curve.op_type, curve.shape, min(curve.best_us, key=curve.best_us.get)
        ('Conv2DBackpropFilter', '32x8x8x384', 26)
    """
    curves = _published().narrowed(cores)
    return curves.noisy(noise, seed) if noise else curves


@cache
def _published() -> Curves:
    rows = [(row, _fitted(row)) for row in TABLE_II]
    law = linear_regression([math.log(w) for _, (w, _) in rows], [math.log(row.best_width) for row, _ in rows])
    curves = [_curve(row.op_type, row.shape, w, _convolution(w, row.best_width, row.loss, y)) for row, (w, y) in rows]
    for kind in CONVOLUTIONS:
        known = [(w, row.best_width, row.loss) for row, (w, _) in rows if row.op_type == kind]
        for w in GRID_US:
            curves.append(_curve(kind, f"{w:g}us", w, _convolution(w, *_between(w, known, law.slope))))
    for kind, (small, large) in TABLE_VI.items():
        for w in GRID_US:
            best_width = min(max(round(math.exp(law.intercept) * w**law.slope), 1), CORES)
            loss = _lerp(math.log(w), [(math.log(SMALL_US), small), (math.log(LARGE_US), large)])
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
    """The `y` at which the time at `other` threads is `ratio` times the best; 1 where it never is."""

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
    """Perfect scaling up to `best_width`, and from there a straight line up to `loss` at 68 threads."""
    best_us = LAUNCH_US + w / best_width
    beyond = max(CORES - best_width, 1)
    rise = [best_us * loss * max(0, p - best_width) / beyond for p in range(1, CORES + 1)]
    return [LAUNCH_US + w / min(p, best_width) + rise[p - 1] for p in range(1, CORES + 1)]


def _between(w: float, rows: list[tuple[float, int, float]], slope: float) -> tuple[float, float]:
    """Best width and loss of a convolution of another size: between the rows, beyond them by the power law."""
    first, last = rows[0], rows[-1]
    loss = _lerp(math.log(w), [(math.log(row[0]), row[2]) for row in rows])
    if w < first[0] or w > last[0]:
        nearest = first if w < first[0] else last
        return max(1.0, nearest[1] * (w / nearest[0]) ** slope), loss
    return math.exp(_lerp(math.log(w), [(math.log(row[0]), math.log(row[1])) for row in rows])), loss


def _lerp(x: float, points: list[tuple[float, float]]) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return points[-1][1]


def _curve(kind: str, shape: str, w: float, times_us: list[float]) -> Curve:
    """Sizes to four digits, so that a file stays small; flops and bytes are those whose work is `w`."""
    if kind in CONVOLUTIONS or kind == "MatMul":
        flops = w * FLOPS_PER_S / 1e6
        size_bytes = flops / 50  # about what the convolutions of ResNet-50 and Inception-v3 have
    else:
        size_bytes = w * BYTES_PER_S / 1e6
        flops = size_bytes / 12  # two floats read and one written for each operation
    rounded = tuple(float(f"{time_us:.6g}") for time_us in times_us)
    return Curve(kind, shape, float(f"{flops:.4g}"), float(f"{size_bytes:.4g}"), rounded)
