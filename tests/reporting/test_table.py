from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from hocket.ir import Costs, Graph, Lane, Op, Plan, Span, Timeline
from hocket.reporting import comparison_table, ops_table, plan_table, timeline_table

from .examples import HOSTILE, example


def rendered(table: Table, width: int = 80) -> str:
    stream = StringIO()
    Console(file=stream, width=width).print(table)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def test_comparison_says_it_all() -> None:
    comparison = replace(example().comparison, speedup=1.23)
    text = rendered(comparison_table(comparison))
    for words in ("eager", "planned", "lower bound", "median", "p90", "speedup 1.23x", "x of the bound"):
        assert words in text
    assert "verdict: planned (the median" in text
    assert "same result: bitwise" in text
    different = replace(comparison, bitwise=False, max_abs_diff=3.1e-7, lower_bound_ms=None, efficiency=None)
    text = rendered(comparison_table(different))
    assert "max difference 3.1e-07" in text
    assert "lower bound" not in text
    assert "of the bound" not in text


def test_ops_keep_their_figures_at_80_columns() -> None:
    found = example()
    text = rendered(ops_table(found.graph, found.costs, top=5))
    lines = text.splitlines()
    assert lines[1].split() == ["op", "layer", "role", "target", "time", "us", "share"]
    costliest = max(found.costs.durations_us.values(), key=lambda durations: durations["1"])["1"]
    assert f"{costliest:,.1f}" in lines[3]
    assert f"{len(found.graph) - 5} other ops" in text


def test_ops_without_a_cost_say_so() -> None:
    text = rendered(ops_table(Graph((Op("a"), Op("b"))), Costs({"a": {"1": 2.0}})))
    assert "100%" in text
    assert "?" in text


def test_lanes_of_a_timeline() -> None:
    timeline = Timeline((Span("a", "left", 0.0, 1000.0), Span("b", "right", 0.0, 250.0)), ("left", "right"))
    text = rendered(timeline_table(timeline))
    assert "simulated step, 1 ms, lanes busy 62% of it" in text
    right = next(line for line in text.splitlines() if line.startswith("right"))
    assert right.split()[1:7] == ["1", "250", "us", "750", "us", "25%"]


def test_lanes_of_a_plan() -> None:
    found = example()
    text = rendered(plan_table(found.graph, found.plan))
    assert f"plan by list: {len(found.graph)} ops on 2 lanes" in text
    assert "cpu0, 1 thread, core 1" in text
    assert "forward" in text


def test_an_op_that_is_in_no_graph_is_unknown() -> None:
    assert "unknown 1" in rendered(plan_table(Graph(()), Plan((Lane("l", ("a",)),))))


@pytest.mark.parametrize("width", [50, 80, 200])
def test_markup_in_names_is_not_read(width: int) -> None:
    found = example(2, prefix="[bold]x[/]\x1b[31m" + HOSTILE)
    for table in (
        comparison_table(found.comparison),
        ops_table(found.graph, found.costs),
        timeline_table(found.timelines["planned"]),
        plan_table(found.graph, found.plan),
    ):
        text = rendered(table, width)
    assert "[bold]x" in rendered(ops_table(found.graph, found.costs), 400)
    assert text
