"""Regression models, and the two tables that set them beside hill climbing."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.curves import Curve, Curves
from benchmarks.regression import evaluate, sampled_widths
from benchmarks.regression_tables import INTERVALS, PAPER_TABLE_IV, SAMPLES, Table, table_iv, table_v

ROOT = Path(__file__).parents[2]
LINEAR = Curves(
    tuple(Curve("Mul", str(n), float(n), float(n), (4.0 * n, 2.0 * n, 1.0 * n, 3.0 * n)) for n in range(1, 41))
)


def text(table: Table) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    return shown.get()


@pytest.mark.parametrize(("n", "widths"), [(1, (34,)), (2, (17, 51)), (4, (9, 26, 43, 60)), (68, tuple(range(1, 69)))])
def test_samples_are_spread_evenly(n: int, widths: tuple[int, ...]) -> None:
    assert sampled_widths(n, 68) == widths
    assert [len(set(sampled_widths(n, 68))) for n in SAMPLES] == list(SAMPLES)


def test_accuracy_and_r2_are_what_the_paper_says() -> None:
    """Nearest neighbours with every op of the training set as a neighbour predict the mean: all can be worked out."""
    known = [Curve("Mul", str(t), 0.0, 0.0, (1.0, t)) for t in (2.0, 4.0)]
    asked = [Curve("Mul", str(t), 0.0, 0.0, (1.0, t)) for t in (1.0, 2.0, 6.0)]
    score = evaluate(Curves(tuple(known)), "K-Neighbors", 1, test=Curves(tuple(asked)))
    assert score.accuracy == pytest.approx(1 - (2 / 1 + 1 / 2 + 3 / 6) / 3)
    assert score.r2 == pytest.approx(1 - (4 + 1 + 9) / (4 + 1 + 9))


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, benchmarks.regression_tables\nprint([m for m in ('torch', 'sklearn', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
