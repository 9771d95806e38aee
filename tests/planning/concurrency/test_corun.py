"""Strategies 3 and 4 of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Machine, Op
from hocket.planning.concurrency.corun import corun
from hocket.planning.moldable.instance import Instance, as_plan, instance_of, makespan_us
from hocket.simulation import simulate
from invariants import illegality, placement_faults
from strategies import apart_in, moldable_cases


@st.composite
def decided(draw):
    case = draw(moldable_cases())
    instance = replace(case.instance, wait_us=draw(st.sampled_from([0.0, 2.5])), apart=draw(apart_in(case)))
    some = st.lists(st.integers(1, instance.num_cores), min_size=1, max_size=3, unique=True).map(sorted)
    candidates = [draw(some) for _ in case.graph.ops]
    widths = [draw(st.sampled_from(mine)) for mine in candidates]
    return instance, widths, candidates


@given(decided())
def test_placements_keep_the_rules_and_to_the_candidates(made):
    instance, widths, candidates = made
    placed = corun(instance, widths, candidates)
    assert placement_faults(instance, placed) == []
    assert all(len(one.cores) in candidates[one.op] for one in placed)


@given(decided(), st.floats(0.5, 2.0))
def test_with_siblings_every_op_runs_once_and_threads_are_never_shared(made, speedup):
    instance, widths, candidates = made
    instance = replace(instance, wait_us=0.0)
    placed = corun(instance, widths, candidates, smt_speedup=speedup)
    assert sorted(one.op for one in placed) == list(range(len(widths)))
    by_op = {one.op: one for one in placed}
    rounding = 1 + 1e-9
    for one in placed:
        lasts_us = instance.durations_us[one.op][len(one.cores)]
        assert (one.end_us - one.start_us) >= lasts_us * min(1.0, speedup / 2) / rounding - 1e-9
        for before in instance.predecessors[one.op]:
            assert one.start_us * rounding >= by_op[before].end_us
        for other in placed:
            beside = one.start_us * rounding < other.end_us and other.start_us * rounding < one.end_us
            if one.op != other.op and beside:
                assert not set(one.cores) & set(other.cores)
                assert other.op not in instance.apart.get(one.op, ())
        if min(one.cores) >= instance.num_cores:
            assert any(
                wide.cores == tuple(range(instance.num_cores))
                and wide.start_us <= one.start_us
                and one.end_us <= wide.end_us * rounding
                for wide in placed
            ), "on siblings only beside an op that has all cores, and within its time"


@given(moldable_cases(smt=2), st.floats(0.6, 1.9))
def test_ops_beside_wide_ones_take_what_the_simulator_says(case, speedup):
    instance = case.instance
    widths = instance.best_width
    placed = corun(instance, widths, [[width] for width in widths], smt_speedup=speedup)
    machine = Machine.of(cores=case.device.cores, smt=2, smt_speedup=speedup)
    plan = as_plan(case.graph, placed, machine.devices[0], "")
    check(case.graph, plan, machine)
    assert illegality(case.graph, plan, machine) is None
    timeline = simulate(case.graph, plan, case.costs, machine)
    for one in placed:
        span = timeline.by_op[case.graph.ops[one.op].name]
        assert (span.start_us, span.end_us) == pytest.approx((one.start_us, one.end_us), rel=1e-6, abs=1e-6)


def instance_by(rows: dict[str, list[float]], *edges: str) -> Instance:
    cores = len(next(iter(rows.values())))
    graph = Graph(tuple(map(Op, rows)), tuple(Edge(*edge) for edge in edges))
    costs = Costs({op: {str(width): us for width, us in enumerate(row, 1)} for op, row in rows.items()})
    return instance_of(graph, costs, Device("cpu0", cores=cores))


def test_the_papers_example():
    """20 idle cores, 1.9 s to go, candidates 18 (1.5 s), 20 (1.3 s) and 16 (2.1 s): 18 is chosen (section III-D)."""
    running = [9.0] * 47 + [1.9] * 21
    ready = [9.0] * 15 + [2.1, 2.0, 1.5, 1.4, 1.3] + [1.3] * 48
    instance = instance_by({"running": running, "ready": ready})
    placed = corun(instance, [48, 20], [[48], [16, 18, 20]])
    assert [(one.op, len(one.cores), one.start_us) for one in placed] == [(0, 48, 0.0), (1, 18, 0.0)]


def test_the_most_expensive_op_where_none_fits_in_time():
    instance = instance_by({"long": [9.0, 9.0, 4.0], "a": [5.0, 5.0, 5.0], "b": [6.0, 6.0, 6.0]})
    placed = corun(instance, [3, 1, 1], [[1], [1], [1]])
    assert [one.op for one in placed] == [0, 2, 1], "first the most expensive of all"
    instance = instance_by({"a": [3.0, 3.0], "b": [6.0, 6.0], "c": [7.0, 7.0], "d": [8.0, 5.0]})
    placed = corun(instance, [1] * 4, [[1], [1], [1], [1]])
    starts = {one.op: one.start_us for one in placed}
    assert starts == {3: 0.0, 2: 0.0, 1: 7.0, 0: 8.0}


def test_what_outlasts_the_running_op_goes_beside_it_only_for_want_of_better():
    """The shorter of two ready ops fits, so the longer one, which would outlast the running op, has to wait."""
    instance = instance_by({"runs": [9.0, 5.0], "longer": [6.0, 6.0], "shorter": [4.0, 4.0]})
    placed = corun(instance, [1, 1, 1], [[1], [1], [1]])
    assert [one.op for one in placed] == [0, 1, 2]
    instance = instance_by({"runs": [5.0, 5.0], "longer": [6.0, 6.0], "shorter": [4.0, 4.0], "first": [7.0, 7.0]})
    placed = corun(instance, [1] * 4, [[1]] * 4)
    assert [one.op for one in placed] == [3, 1, 0, 2]


def test_small_ops_go_to_the_siblings_of_a_full_width_op():
    rows = {"wide": [90.0, 50.0], "small": [10.0, 10.0], "next": [5.0, 5.0], "large": [60.0, 60.0]}
    instance = instance_by(rows, ("small", "next"))
    placed = {one.op: one for one in corun(instance, [2, 1, 1, 1], [[2], [1], [1], [1]], smt_speedup=1.25)}
    assert placed[3].cores in ((0,), (1,)), "the most expensive one is not as wide as the device"
    rows["large"] = [20.0, 20.0]
    instance = instance_by(rows, ("small", "next"))
    placed = {one.op: one for one in corun(instance, [2, 1, 1, 1], [[2], [1], [1], [1]], smt_speedup=1.25)}
    assert placed[0].cores == (0, 1)
    assert {placed[op].cores for op in (1, 3)} == {(2,), (3,)}
    assert placed[1].start_us == placed[3].start_us == 0.0
    assert placed[1].end_us == pytest.approx(16.0)
    assert placed[2].start_us == pytest.approx(16.0), "what waited for a small op follows it"
    assert placed[2].end_us == pytest.approx(24.0)
    assert placed[3].end_us == pytest.approx(32.0)
    assert placed[0].end_us == pytest.approx(32.0 + 50.0 - 20.0), "20 us of its work done by then, in 32"


def test_what_would_outlast_the_wide_op_does_not_go_beside_it():
    instance = instance_by({"wide": [90.0, 50.0], "fits": [49.0, 40.0], "outlasts": [51.0, 40.0]})
    placed = {one.op: one for one in corun(instance, [2, 1, 1], [[2], [2], [2]], smt_speedup=1.25)}
    assert placed[0].cores == (0, 1)
    assert min(placed[1].cores) >= 2
    assert placed[2].cores == (0, 1)


def test_without_siblings_nothing_goes_there():
    instance = instance_by({"wide": [90.0, 50.0], "small": [10.0, 10.0]})
    placed = corun(instance, [2, 1], [[2], [1]])
    assert makespan_us(placed) == 60.0
    assert max(core for one in placed for core in one.cores) == 1
