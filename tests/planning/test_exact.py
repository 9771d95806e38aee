"""The optimum of small graphs: against brute force, and as the measure of looking ahead."""

import random
import sys
from statistics import fmean

import pytest
from hypothesis import given, settings

from hocket.checking import check
from hocket.errors import MissingDependencyError
from hocket.ir import Costs, Edge, Graph, Machine, Op
from hocket.planning import plan
from hocket.planning.exact import GAP, RESOLUTION, solve
from hocket.planning.moldable.instance import Instance, makespan_us
from hocket.planning.moldable.local_search import improve
from hocket.planning.moldable.sgs import serial_sgs
from hocket.simulation import simulate
from invariants import moldable_optimum_us, placement_faults
from strategies import instance_by, moldable_cases
from support.refusals import fails, refused

pytest.importorskip("ortools")

# A proof of so few ops takes seconds; a machine that is busy otherwise may take its time.
AMPLE_S = 3600.0


@settings(max_examples=40)
@given(moldable_cases(max_ops=4, max_cores=3))
def test_no_plan_by_brute_force_is_shorter(case):
    instance = case.instance
    placed, proved = solve(instance, AMPLE_S)
    assert proved
    assert placement_faults(instance, placed) == []
    best_us = moldable_optimum_us(instance)
    serial_us = sum(min(of_op[1:]) for of_op in instance.durations_us)
    slack_us = GAP * best_us + len(case.graph) * serial_us / RESOLUTION
    assert best_us * (1 - 1e-9) <= makespan_us(placed) <= best_us * (1 + 1e-9) + slack_us


@settings(max_examples=20)
@given(moldable_cases(max_ops=6, max_cores=4))
def test_its_plan_is_legal_and_no_other_planners_is_shorter(case):
    found = plan(case.graph, case.costs, case.machine, planner="exact", time_limit_s=AMPLE_S)
    check(case.graph, found, case.machine)
    assert found.planner == "exact"
    exact_us = simulate(case.graph, found, case.costs, case.machine).makespan_us
    for planner in ("serial", "list"):
        other = plan(case.graph, case.costs, case.machine, planner=planner)
        serial_us = sum(min(row.values()) for row in case.costs.durations_us.values())
        other_us = simulate(case.graph, other, case.costs, case.machine).makespan_us
        assert exact_us <= other_us * (1 + GAP) + len(case.graph) * serial_us / RESOLUTION + 1e-9


def step(seed: int) -> Instance:
    """A random graph of 4 to 12 ops on 2 to 8 cores: serial parts, threads that cost their start, any density."""
    rng = random.Random(seed)
    count, cores, density = rng.randint(4, 12), rng.randint(2, 8), rng.choice((0.1, 0.25, 0.5))
    names = [f"op{i}" for i in range(count)]
    edges = [(names[i], names[j]) for j in range(count) for i in range(j) if rng.random() < density]
    rows = {}
    for name in names:
        work_us, serial, spawn_us = rng.uniform(5, 100), rng.choice((0.0, 0.05, 0.2, 0.6)), rng.choice((0.0, 0.3, 1.0))
        rows[name] = [work_us * (serial + (1 - serial) / p) + spawn_us * (p - 1) for p in range(1, cores + 1)]
    return instance_by(rows, *edges)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.slow)])
def test_looking_ahead_is_within_3_percent_of_the_optimum_in_the_mean(seeds):
    """The number of tries ends the search here, not the clock, so that a busy machine finds the same."""
    ratios = []
    for instance in map(step, seeds):
        optimum, _ = solve(instance, AMPLE_S)
        serial = serial_sgs(instance, [instance.num_cores] * len(instance.order), instance.order)
        found = improve(instance, serial, budget_s=AMPLE_S)
        ratios.append(makespan_us(found) / makespan_us(optimum))
    assert fmean(ratios) <= 1.03
    assert min(ratios) >= 1 - 2 * GAP


def test_widths_and_order_by_hand():
    graph = Graph(tuple(map(Op, "abc")), (Edge("a", "c"),))
    costs = Costs({"a": {"1": 6.0, "2": 5.0}, "b": {"1": 7.0, "2": 4.0}, "c": {"1": 6.0, "2": 2.0}})
    machine = Machine.of(cores=2)
    found = plan(graph, costs, machine, planner="exact")
    assert simulate(graph, found, costs, machine).makespan_us == 9.0
    assert [found.lane_of[op].width for op in "abc"] == [1, 1, 2]


def test_every_order_of_an_instance_of_no_time_is_best():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 0.0} for op in "ab"})
    assert simulate(graph, plan(graph, costs, Machine.of(cores=2), planner="exact"), costs, Machine.of(cores=2)).spans
    assert plan(Graph(()), Costs({}), Machine.of(cores=2), planner="exact").lanes == ()


def test_large_graphs_and_senseless_options_are_refused():
    graph = Graph(tuple(Op(f"op{i}") for i in range(25)))
    costs = Costs({op.name: {"1": 1.0} for op in graph.ops})
    for options, message in (
        ({}, "25 ops, and the optimum is searched for up to 24; raise max_ops"),
        ({"time_limit_s": 0}, "expected time_limit_s > 0, got 0"),
        ({"max_ops": 0}, "expected max_ops to be a whole number >= 1, got 0"),
    ):
        refused(message, plan, graph, costs, Machine.of(cores=2), planner="exact", **options)


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    graph, costs = Graph((Op("a"),)), Costs({"a": {"1": 1.0}})
    fails(MissingDependencyError, r"hocket\[exact\]", plan, graph, costs, Machine.of(cores=2), planner="exact")
