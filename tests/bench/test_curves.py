"""Curves of 68 cores: that they are what the paper printed, what a graph makes of them, what climbs find on them."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import Curve, Curves, for_graph
from benchmarks.knl import TABLE_II, TABLE_VI, published_knl
from benchmarks.regression_tables import accuracy, climb
from hocket.errors import InputError
from hocket.ir import Graph, Op

KNL = published_knl()
KINDS = sorted({curve.op_type for curve in KNL})
TARGETS = {
    "Conv2D": ("aten.convolution", "forward"),
    "Conv2DBackpropInput": ("aten.convolution_backward", "activation_grad"),
    "Conv2DBackpropFilter": ("aten.convolution_backward", "weight_grad"),
    "MatMul": ("aten.addmm", "forward"),
    "Mul": ("aten.threshold_backward", "activation_grad"),
    "AddN": ("aten.add", "forward"),
    "FusedBatchNorm": ("aten.native_batch_norm_backward", "activation_grad"),
    "AvgPool": ("aten.avg_pool2d", "forward"),
    "MaxPooling": ("aten.max_pool2d_with_indices", "forward"),
    "SparseSoftmaxCross": ("aten._log_softmax", "forward"),
    "BiasAddGrad": ("aten.sum", "bias_grad"),
    "ApplyAdam": ("aten.addcdiv_", "update"),
    "Tile": ("aten.cat", "forward"),
}


def op_of(kind: str, wanted_us: float) -> Op:
    """An op of so many microseconds of work, as `work_us` counts it."""
    target, role = TARGETS[kind]
    return Op("op", target, role, flops=wanted_us * 1e4, size_bytes=wanted_us)


def best_of(curve: Curve) -> int:
    return min(curve.best_us, key=lambda width: (curve.best_us[width], width))


@pytest.mark.parametrize("row", TABLE_II, ids=lambda row: f"{row.op_type}-{row.shape}")
def test_every_figure_of_table_ii_is_met(row) -> None:
    (curve,) = [c for c in KNL if (c.op_type, c.shape) == (row.op_type, row.shape)]
    assert best_of(curve) == row.best_width
    assert curve.best_us[row.best_width] == pytest.approx(row.best_us, rel=1e-6)
    assert curve.best_us[68] / row.best_us - 1 == pytest.approx(row.loss, abs=1e-6)
    if row.ratio_34:  # Table III
        assert curve.best_us[34] / curve.best_us[68] == pytest.approx(row.ratio_34, abs=1e-3)


def test_no_op_loses_more_than_table_vi_says() -> None:
    for curve in KNL:
        if curve.op_type in TABLE_VI:
            loss = curve.best_us[68] / min(curve.best_us.values()) - 1
            assert -1e-6 <= loss <= max(TABLE_VI[curve.op_type]) + 1e-6
            if best_of(curve) == 1 and curve.work_us < 5:
                assert loss == pytest.approx(TABLE_VI[curve.op_type][0], abs=1e-6)


@given(st.sampled_from(KINDS), st.floats(0.01, 1e8))
def test_a_curve_of_any_size_has_one_valley(kind: str, wanted_us: float) -> None:
    """Section III-C: the variance of execution time is shown as a convex function."""
    times, _ = KNL.times_us(op_of(kind, wanted_us))
    assert min(times) > 0
    slopes = [b - a for a, b in pairwise(times)]
    assert all(b >= a - 1e-5 * max(times) for a, b in pairwise(slopes))


@given(st.sampled_from(KINDS), st.floats(0.01, 1e8))
def test_climbs_at_interval_4_choose_within_2_percent(kind: str, wanted_us: float) -> None:
    times, _ = KNL.times_us(op_of(kind, wanted_us))
    for also in (None, ()):
        found = climb(lambda width, _: times[width - 1], 68, 4, also=also)
        assert found.best_us <= 1.02 * min(times)


def test_climbs_at_interval_4_predict_95_percent_on_the_published_set() -> None:
    climbs = [(curve, climb(curve.time_us, 68, 4)) for curve in KNL]
    assert fmean(accuracy(found, curve.best_us) for curve, found in climbs) >= 0.95
    climbed = [accuracy(found, curve.best_us, range(1, found.path[-1] + 1)) for curve, found in climbs]
    assert fmean(climbed) >= 0.95


def by_hand() -> Curves:
    sizes = {"small": 1e4, "large": 3e4}
    times = {"small": (10.0, 8.0), "large": (30.0, 16.0)}
    return Curves(
        tuple(Curve("aten.mm:forward", name, sizes[name], 0.0, times[name]) for name in sizes), source="measured"
    )


@pytest.mark.parametrize(
    ("flops", "times", "source"),
    [
        (1e4, (10.0, 8.0), "measured"),
        (3e4, (30.0, 16.0), "measured"),
        (2e4, (20.0, 12.0), "analytic"),
        (1e3, (10.0, 8.0), "analytic"),
        (6e4, (60.0, 32.0), "analytic"),
    ],
)
def test_sizes_between_and_beyond_those_that_are_known(flops, times, source) -> None:
    graph = Graph((Op("mine", "aten.mm", "forward", flops=flops),))
    costs = for_graph(graph, by_hand())
    assert [costs.duration_us("mine", width=width) for width in (1, 2)] == pytest.approx(times)
    assert costs.lookup("mine").source == source


def test_an_op_of_a_type_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"no curve for op 'relu', a aten.relu \(Mul\)"):
        for_graph(Graph((Op("relu", "aten.relu", "forward"),)), by_hand())
