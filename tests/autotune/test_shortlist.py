"""Decisions by the profile alone: plans that cannot win, and the longest chain."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.autotune.shortlist import MAX_FINALISTS, NOISE, Profile, Proposal, finalists, longest_chain, profile_of
from hocket.backends import CpuBackend
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan, Span, Timeline
from hocket.planning import bounds
from strategies import moldable_cases


def proposal(planner: str, simulated_ms: float, error: float) -> Proposal:
    timeline = Timeline((Span("a", "main", 0.0, simulated_ms * 1e3),), ("main",))
    nothing: Any = None
    profile = Profile("", nothing, nothing, 1.0, error)
    return Proposal(profile, Plan((Lane("main", ("a",)),), planner=planner), timeline)


def chosen(error: float, **simulated_ms: float) -> list[float]:
    made = [proposal(name.partition("_")[0], ms, error) for name, ms in simulated_ms.items()]
    return [each.predicted_ms for each in finalists(made)]


def test_what_simulation_shows_to_lose_takes_no_step():
    assert chosen(1.1, serial=10.0, list=8.0, phases=11.5, concurrency=12.0) == [8.0, 10.0, 11.5]
    assert chosen(1.1, serial=10.0, list=13.0) == [10.0]
    assert chosen(1.1, serial_wide=10.0, serial_narrow=18.0, list=9.0) == [9.0, 10.0]


def test_the_margin_is_what_simulation_was_measured_to_be_wrong_by():
    assert chosen(1.5, serial_wide=10.0, serial_narrow=15.5) == [10.0, 15.5]
    assert chosen(1.4, serial_wide=10.0, serial_narrow=15.5) == [10.0]


def test_of_plans_that_may_win_the_best_few_and_every_serial_one():
    assert chosen(2.0, list=5.0, phases=6.0, concurrency=7.0, exact=8.0, serial_wide=9.0, serial_narrow=10.0) == [
        *(5.0, 6.0, 7.0),
        *(9.0, 10.0),
    ]
    assert MAX_FINALISTS == 3


def test_a_planner_that_was_asked_for_by_name_is_never_dropped():
    assert chosen(1.0, list=5.0) == [5.0]


@given(st.floats(1.0, 3.0), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100)), st.integers(1, 100))
def test_no_plan_is_dropped_that_could_win_within_the_error(error, others_ms, serial_ms):
    found = chosen(error, serial=serial_ms, **others_ms)
    assert min([serial_ms, *others_ms.values()]) in found
    better = sorted(ms for ms in others_ms.values() if ms <= serial_ms * error * NOISE)[:MAX_FINALISTS]
    assert set(better[: MAX_FINALISTS - 1]) <= set(found), "the serial plan may be among the best itself"


def test_the_error_of_simulation_is_measured_on_what_the_profile_ran():
    graph = Graph((Op("a"), Op("b")), (Edge("a", "b"),))
    costs = Costs({op: {"1": 1000.0, "2": 600.0} for op in "ab"})
    step: Any = SimpleNamespace(graph=graph)
    plans = [
        Plan((Lane("main", ("a", "b"), width=width, cores=tuple(range(width))),), planner="serial") for width in (1, 2)
    ]
    backend = CpuBackend(Machine.of(cores=2), "python")
    found = profile_of("", step, costs, backend, [(plans[0], [9.0, 2.2, 2.1]), (plans[1], [5.0, 1.5, 1.8])])
    assert found.error == pytest.approx(1.5 / 1.2)
    assert found.fastest_ms == 1.5
    quick = profile_of("", step, costs, backend, [(plans[0], [1.9])])
    assert quick.error == 1.0, "a step that is faster than its simulation says nothing about those that are slower"


@given(moldable_cases(max_ops=8))
def test_the_longest_chain_is_no_longer_than_any_plan(case):
    found = longest_chain(case.graph, case.costs)
    limits = bounds(case.graph, case.costs, case.machine)
    assert found.duration_ms * 1e3 == pytest.approx(limits.critical_path_us)
    assert found.op_ms <= found.duration_ms * (1 + 1e-9)
    assert found.op_ms * 1e3 == pytest.approx(min(case.costs.durations_us[found.op].values()))
