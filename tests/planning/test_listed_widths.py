"""Ops that may run at some widths only: no planner puts one elsewhere, and plans are still made."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import check, plan
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan, one_by_one
from hocket.planning import bounds, planners
from hocket.planning.base import misplaced
from hocket.simulation import simulate
from support.refusals import refused

AUTOMATIC = [name for name, maker in planners().items() if maker.automatic]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Graph, Costs, Machine]:
    """A graph whose ops may run at one width at least, on up to four cores."""
    cores = draw(st.integers(1, 4))
    count = draw(st.integers(1, 8))
    names = [f"op{number}" for number in range(count)]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    widths = st.lists(st.integers(1, cores), min_size=1, unique=True)
    durations_us = {name: {str(width): draw(st.floats(0.0, 100.0)) for width in draw(widths)} for name in names}
    graph = Graph(tuple(map(Op, names)), tuple(Edge(names[a], names[b]) for a, b in edges))
    return graph, Costs(durations_us, only_listed=True), Machine.of(cores=cores)


@pytest.mark.parametrize("planner", AUTOMATIC)
@given(steps())
def test_no_planner_puts_an_op_where_it_may_not_run(planner: str, step: tuple[Graph, Costs, Machine]) -> None:
    graph, costs, machine = step
    made = plan(graph, costs, machine, planner=planner)
    check(graph, made, machine)
    assert misplaced(made, costs) is None
    limits = bounds(graph, costs, machine)
    assert simulate(graph, made, costs, machine).makespan_us >= limits.lower_us * (1 - 1e-9)


def test_a_simulation_of_an_op_where_it_may_not_run_says_so() -> None:
    graph, costs = Graph((Op("sum"),)), Costs({"sum": {"2": 5.0}}, only_listed=True)
    narrow = Plan((Lane("a", ("sum",), device="cpu0", width=1, cores=(0,)),))
    refused("op 'sum' may not run with 1 thread", simulate, graph, narrow, costs, Machine.of(cores=2))
    assert misplaced(narrow, costs) == ("sum", 1)
    assert misplaced(narrow, Costs({"sum": {"2": 5.0}})) is None


def test_ops_of_several_widths_take_turns() -> None:
    machine = Machine.of(cores=2)
    graph = Graph(tuple(map(Op, "abc")))
    made = one_by_one(graph, graph.order, {"a": 1, "b": 2, "c": 1}, machine.devices[0])
    check(graph, made, machine)
    costs = Costs({op: {"1": 1.0, "2": 1.0} for op in "abc"})
    spans = sorted(simulate(graph, made, costs, machine).spans, key=lambda span: span.start_us)
    assert [span.op for span in spans] == ["a", "b", "c"]
    assert all(first.end_us <= second.start_us for first, second in pairwise(spans))


def test_listed_widths_outlive_a_file(tmp_path) -> None:
    costs = Costs({"a": {"1": 3.0, "2": 2.0}}).at_widths({"a": {2}})
    assert costs.durations_us == {"a": {"2": 2.0}}
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert costs.restricted(["a"]).only_listed
    assert costs.merged(Costs({"b": {"1": 1.0}})).only_listed
    assert costs.duration_us("a", width=1) == float("inf")
    assert costs.nearest_width("a", 1) == 2
