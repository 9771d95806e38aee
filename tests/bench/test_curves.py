"""Curves of 68 cores: that they are what the paper printed, and what a graph makes of them."""

from __future__ import annotations

import pytest

from benchmarks.curves import Curve, Curves, for_graph
from benchmarks.knl import TABLE_II, published_knl
from hocket.errors import InputError
from hocket.ir import Graph, Op

KNL = published_knl()


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
