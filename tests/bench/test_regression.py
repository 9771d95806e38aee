"""Regression models, and the two tables that set them beside hill climbing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.curves import Curve, Curves
from benchmarks.regression_tables import INTERVALS, PAPER_TABLE_IV, Table, table_iv, table_v

LINEAR = Curves(
    tuple(Curve("Mul", str(n), float(n), float(n), (4.0 * n, 2.0 * n, 1.0 * n, 3.0 * n)) for n in range(1, 41))
)


def text(table: Table) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    return shown.get()


def test_table_iv_sets_the_papers_figures_beside_ours() -> None:
    table = table_iv(LINEAR, models=("K-Neighbors", "OLS"), samples=(1,), widths=[1])
    accuracy, r2 = table.rows
    assert accuracy.values["OLS"] == pytest.approx(1)
    assert r2.values["OLS"] == pytest.approx(1)
    assert accuracy.paper == (PAPER_TABLE_IV[1][0][1], PAPER_TABLE_IV[1][0][3])
    shown = text(table)
    assert "100% (27%)" in shown
    assert "1.000 (0.981)" in shown
    noisy = table_iv(LINEAR, models=("OLS",), samples=(1,), widths=[1], noise=0.02)
    assert noisy.rows[0].values["OLS"] < accuracy.values["OLS"]
    assert "2% noise" in noisy.title


def test_table_v_reaches_what_the_issue_asks_for() -> None:
    table = table_v()
    rows = {row.interval: row for row in table.rows}
    assert tuple(rows) == INTERVALS
    assert rows[4].accuracy >= 0.95
    assert rows[4].climbed >= 0.95
    assert rows[4].worst_loss <= 0.02
    assert rows[4].num_steps <= 20
    falling = [rows[interval].accuracy for interval in INTERVALS]
    assert falling == sorted(falling, reverse=True), "as in the paper, a longer interval predicts less"
    assert "published curves" in text(table)
