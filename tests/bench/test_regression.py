"""Regression models, and the two tables that set them beside hill climbing."""

import io

import pytest
from rich.console import Console

from benchmarks.curves import Curve, Curves
from benchmarks.regression import INTERVALS, climbs, regressions, table_iv, table_v

LINEAR = Curves(
    tuple(Curve("Mul", str(n), float(n), float(n), (4.0 * n, 2.0 * n, 1.0 * n, 3.0 * n)) for n in range(1, 41))
)


def text(table) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    return shown.get()


def test_table_iv_sets_the_papers_figures_beside_ours() -> None:
    small = {"models": ("K-Neighbors", "OLS"), "samples": (1,), "widths": [1]}
    accuracy, r2 = regressions(LINEAR, **small)
    assert accuracy["ours"]["OLS"] == pytest.approx(1)
    assert r2["ours"]["OLS"] == pytest.approx(1)
    assert accuracy["paper"] == {"K-Neighbors": 0.56, "OLS": 0.27}
    shown = text(table_iv(LINEAR, **small))
    assert "100% (27%)" in shown
    assert "1.000 (0.981)" in shown
    noisy, _ = regressions(LINEAR, **small, noise=0.02)
    assert noisy["ours"]["OLS"] < accuracy["ours"]["OLS"]


def test_table_v_reaches_what_the_issue_asks_for() -> None:
    rows = {row["interval"]: row for row in climbs()}
    assert tuple(rows) == INTERVALS
    assert rows[4]["accuracy"] >= 0.95
    assert rows[4]["climbed"] >= 0.95
    assert rows[4]["worst_loss"] <= 0.02
    assert rows[4]["num_steps"] <= 20
    falling = [rows[interval]["accuracy"] for interval in INTERVALS]
    assert falling == sorted(falling, reverse=True), "as in the paper, a longer interval predicts less"
    assert "published curves" in text(table_v())
