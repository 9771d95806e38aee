"""Many-core curves: the time of an op at every width, for machines that are not at hand.

`benchmarks.knl.published_knl` builds them from published tables. `for_graph` gives the ops of a captured graph the
times of the curves of their type: in a training step the same few kernels come back in many sizes, and for one kernel
time grows steadily with its work.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Op

# One thread of a Xeon Phi 7250: what the convolutions of Table II reach with the kernels that Inception-v3 has on
# these inputs (see docs/models.md), and its share of the 400 GB/s that the vendor states for the on-package memory.
FLOPS_PER_S, BYTES_PER_S = 1.0e10, 5.9e9


@dataclass(frozen=True)
class Curve:
    """The time of one op at 1, 2, 3, ... threads, with the better of two affinities.

    `op_type` is a type of the paper, such as ``Conv2DBackpropFilter``, of a recorded op ``target:role``, and `shape` a
    text that identifies it within its type.
    """

    op_type: str
    shape: str
    flops: float
    size_bytes: float
    times_us: tuple[float, ...]

    @cached_property
    def best_us(self) -> dict[int, float]:
        """Width -> microseconds."""
        return dict(enumerate(self.times_us, 1))

    @property
    def work_us(self) -> float:
        return work_us(self.flops, self.size_bytes)


@dataclass(frozen=True)
class Curves:
    """Curves of many ops, all of as many widths, and where they come from (`source` as in `Costs.sources`)."""

    curves: tuple[Curve, ...]
    note: str = ""
    source: str = "published"

    @cached_property
    def _by_type(self) -> dict[str, list[Curve]]:
        found: dict[str, list[Curve]] = {}
        for curve in sorted(self.curves, key=lambda curve: curve.work_us):
            found.setdefault(curve.op_type, []).append(curve)
        return found

    def __iter__(self) -> Iterator[Curve]:
        return iter(self.curves)

    @property
    def cores(self) -> int:
        """The widest width."""
        return len(self.curves[0].times_us)

    def narrowed(self, cores: int) -> Curves:
        """The same ops on the first `cores` cores of the same machine."""
        return replace(self, curves=tuple(replace(curve, times_us=curve.times_us[:cores]) for curve in self.curves))

    def noisy(self, share: float, seed: int = 0) -> Curves:
        """Every time multiplied by a number drawn around 1, with standard deviation `share` (and at least 0.1)."""
        rng = random.Random(seed)
        shaken = [tuple(us * max(0.1, rng.gauss(1.0, share)) for us in curve.times_us) for curve in self.curves]
        curves = tuple(replace(c, times_us=times_us) for c, times_us in zip(self.curves, shaken, strict=True))
        return replace(self, curves=curves, note=f"{self.note}; with noise of {share:.1%}, seed {seed}")

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
            return tuple(wanted_us / curves[-1].work_us * time_us for time_us in curves[-1].times_us), False
        high = curves[at]
        if at == 0 or high.work_us == wanted_us:
            return high.times_us, high.work_us == wanted_us and types[0] == _type(op)
        low = curves[at - 1]
        share = (wanted_us - low.work_us) / (high.work_us - low.work_us)
        return tuple(a + share * (b - a) for a, b in zip(low.times_us, high.times_us, strict=True)), False

    @staticmethod
    def recorded(graph: Graph, costs: Costs) -> Curves:
        """The curves of a graph's ops, each kind once, from costs that know every width from 1 to the widest."""
        found: dict[tuple[str, float, float], Curve] = {}
        for op in graph.ops:
            kind = (_type(op), op.flops, op.size_bytes)
            times_us = tuple(costs.durations_us[op.name].values())
            found.setdefault(kind, Curve(kind[0], op.name, op.flops, op.size_bytes, times_us))
        sources = {costs.sources.get(op.name, "measured") for op in graph.ops}
        return Curves(tuple(found.values()), costs.note, sources.pop() if len(sources) == 1 else "analytic")


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
    """Return the paper's type of an op. An op of no other type is a ``Mul``, as any elementwise op."""
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
