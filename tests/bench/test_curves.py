"""Curves of 68 cores are what the paper printed."""

import pytest

from benchmarks.curves import Curve
from benchmarks.knl import TABLE_II, published_knl

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
