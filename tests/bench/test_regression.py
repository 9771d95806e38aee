"""Regression models, and the two tables that set them beside hill climbing."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.curves import Curve, Curves
from benchmarks.knl import published_knl
from benchmarks.regression import MODELS, evaluate, sampled_widths, train
from benchmarks.regression_tables import (
    INTERVALS,
    PAPER_TABLE_IV,
    PAPER_TABLE_V,
    SAMPLES,
    Table,
    table_iv,
    table_v,
)
from hocket.errors import InputError, MissingDependencyError

ROOT = Path(__file__).parents[2]
KNL = published_knl()
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


def test_a_linear_model_learns_what_is_linear() -> None:
    score = evaluate(LINEAR, "OLS", 1)
    assert score.accuracy == pytest.approx(1)
    assert score.r2 == pytest.approx(1)


def test_accuracy_and_r2_are_what_the_paper_says() -> None:
    """Nearest neighbours with every op of the training set as a neighbour predict the mean: all can be worked out."""
    known = [Curve("Mul", str(t), 0.0, 0.0, (1.0, t)) for t in (2.0, 4.0)]
    asked = [Curve("Mul", str(t), 0.0, 0.0, (1.0, t)) for t in (1.0, 2.0, 6.0)]
    score = evaluate(Curves(tuple(known)), "K-Neighbors", 1, test=Curves(tuple(asked)))
    assert score.accuracy == pytest.approx(1 - (2 / 1 + 1 / 2 + 3 / 6) / 3)
    assert score.r2 == pytest.approx(1 - (4 + 1 + 9) / (4 + 1 + 9))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_and_repeats(model: str) -> None:
    first, second = (evaluate(KNL, model, 4, widths=[5, 68]) for _ in range(2))
    assert first == second
    assert math.isfinite(first.accuracy)
    assert first.accuracy <= 1
    assert first.r2 <= 1


def test_a_trained_model_gives_back_what_was_sampled_and_knows_what_it_does_not() -> None:
    trained = train(KNL, "K-Neighbors", 4, widths=[5])
    curves = list(KNL)[:3]
    assert trained.sampled == (9, 26, 43, 60)
    assert trained.predict_us(curves, 26) == [curve.best_us[26] for curve in curves]
    assert len(trained.predict_us(curves, 5)) == 3
    with pytest.raises(InputError, match="not trained for width 6; for 5"):
        trained.predict_us(curves, 6)


def test_counters_are_features_where_they_are_offered() -> None:
    counters = {str(n): {"cycles": float(n), "misses": 0.5} for n in range(1, 41)}
    trained = train(LINEAR, "OLS", 1, counters=counters)
    assert trained.events == ("cycles", "misses")
    (time_us,) = trained.predict_us([LINEAR.curves[6]], 1, counters)
    assert time_us == pytest.approx(28.0)
    del counters["7"]["misses"]
    with pytest.raises(InputError, match="op Mul 7 has no counter misses"):
        trained.predict_us([LINEAR.curves[6]], 1, counters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((KNL, "Ridge", 4), "unknown model 'Ridge'; one of Gradient Boosting"),
        ((KNL, "OLS", 0), "from 1 to 68 sampled widths, got 0"),
        ((KNL, "OLS", 69), "from 1 to 68 sampled widths, got 69"),
        ((KNL, "OLS", 68), "no width left to test on"),
        ((Curves(LINEAR.curves[:1]), "OLS", 1), "no op left to test on"),
    ],
)
def test_what_cannot_be_evaluated_is_said(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(*arguments)
    with pytest.raises(InputError, match="no curves to train on"):
        train([], "OLS", 1)


def test_without_scikit_learn_the_error_names_the_command(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"scikit-learn: pip install 'hocket\[models\]'"):
        evaluate(LINEAR, "OLS", 1)
    assert table_v(intervals=(4,)).rows, "climbing needs none of it"


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


def test_table_v_to_the_letter_and_with_noise() -> None:
    (letter,) = table_v({"DCGAN": KNL}, intervals=(4,), also=()).rows
    (ours,) = table_v({"DCGAN": KNL}, intervals=(4,)).rows
    assert letter.accuracy < ours.accuracy
    assert letter.num_steps < ours.num_steps
    (noisy,) = table_v({"DCGAN": KNL}, intervals=(4,), noise=0.02).rows
    (again,) = table_v({"DCGAN": KNL}, intervals=(4,), noise=0.02).rows
    assert again.cells() == noisy.cells()
    assert noisy.accuracy >= 0.95
    assert noisy.mean_loss <= 0.02
    rows = table_v({"LSTM": published_knl(16)}).rows
    assert tuple(row.paper for row in rows) == PAPER_TABLE_V["LSTM"]
