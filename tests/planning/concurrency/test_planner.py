"""The planner `concurrency`: what each strategy says, and that whatever it makes is legal."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.checking import check
from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Machine, Op
from hocket.planning import plan
from hocket.planning.concurrency.planner import strategy_candidates, strategy_widths
from hocket.planning.moldable.instance import instance_of
from hocket.simulation import simulate
from invariants import all_waits, illegality
from strategies import Moldable, moldable_cases

STRATEGIES = [tuple(found) for size in range(5) for found in itertools.combinations((1, 2, 3, 4), size)]


@st.composite
def planned(draw, strategies=None, lookahead=(0.0, 0.0, 3.0), halves=(False, True)):
    """A case, options of the planner, and its plan."""
    case = draw(moldable_cases(max_ops=12, smt=2))
    names = st.sampled_from(list(case.graph.by_name))
    options = {
        "strategies": draw(st.sampled_from(strategies or STRATEGIES)),
        "lookahead_ms": draw(st.sampled_from(lookahead)),
        "coarsen_us": draw(st.sampled_from([0.0, 20.0, 1e6])),
        "wait_us": draw(st.sampled_from([0.0, 5.0])),
        "avoid": draw(st.lists(st.tuples(names, names), max_size=4)),
        "halves": draw(st.sampled_from(halves)),
    }
    return case, options, made(case, **options)


def made(case: Moldable, **options):
    return plan(case.graph, case.costs, case.machine, planner="concurrency", **options)


@given(planned())
def test_whatever_the_options_the_plan_is_legal(case_options_plan):
    case, _, found = case_options_plan
    check(case.graph, found, case.machine)
    assert illegality(case.graph, found, case.machine) is None
    assert found.planner == "concurrency"


@given(planned())
def test_pairs_to_avoid_are_never_side_by_side_whatever_the_ops_take(case_options_plan):
    case, options, found = case_options_plan
    waits = all_waits(case.graph, found)
    timeline = simulate(case.graph, found, case.costs, case.machine, options["wait_us"])
    for one, other in options["avoid"]:
        if one != other:
            assert one in waits[other] or other in waits[one]
            spans = sorted((timeline.by_op[op].start_us, timeline.by_op[op].end_us) for op in (one, other))
            assert spans[0][1] <= spans[1][0] * (1 + 1e-9)


@given(planned())
def test_no_thread_is_used_twice_at_once(case_options_plan):
    case, options, found = case_options_plan
    timeline = simulate(case.graph, found, case.costs, case.machine, options["wait_us"])
    for one, other in itertools.combinations(timeline.spans, 2):
        if min(one.end_us, other.end_us) > max(one.start_us, other.start_us) * (1 + 1e-9) + 1e-9:
            assert not set(found.lane_of[one.op].cores) & set(found.lane_of[other.op].cores)


@given(planned(strategies=[()], lookahead=(0.0,)))
def test_without_strategies_the_framework_s_recommended_setting(case_options_plan):
    case, _, found = case_options_plan
    (lane,) = found.lanes
    assert (lane.width, lane.cores) == (case.device.cores, tuple(range(case.device.cores)))
    recommended = plan(case.graph, case.costs, case.machine, planner="serial")
    assert simulate(case.graph, found, case.costs, case.machine).makespan_us == pytest.approx(
        simulate(case.graph, recommended, case.costs, case.machine).makespan_us
    )


@given(planned(strategies=[(), (1,), (2,), (1, 2), (4,), (1, 4), (1, 2, 4)], lookahead=(0.0,)))
def test_without_strategy_3_nothing_runs_side_by_side(case_options_plan):
    case, _, found = case_options_plan
    spans = sorted(simulate(case.graph, found, case.costs, case.machine).spans, key=lambda s: (s.start_us, s.end_us))
    for one, other in itertools.pairwise(spans):
        assert one.end_us <= other.start_us * (1 + 1e-9)


@given(moldable_cases())
def test_strategy_1_is_each_ops_own_best_width(case):
    found = made(case, strategies=(1,), lookahead_ms=0.0, coarsen_us=0.0)
    for op in case.graph.by_name:
        durations = case.costs.durations_us[op]
        assert durations[str(found.lane_of[op].width)] == min(durations.values())
    total_us = sum(min(durations.values()) for durations in case.costs.durations_us.values())
    assert simulate(case.graph, found, case.costs, case.machine).makespan_us == pytest.approx(total_us)


@given(moldable_cases(), st.sampled_from([(2,), (1, 2)]))
def test_strategy_2_is_one_width_for_each_type_that_of_its_largest_instance(case, strategies):
    found = made(case, strategies=strategies, lookahead_ms=0.0, coarsen_us=0.0)
    for kind in {(op.target, op.role) for op in case.graph.ops}:
        alike = [op.name for op in case.graph.ops if (op.target, op.role) == kind]
        (width,) = {found.lane_of[op].width for op in alike}
        longest_us = max(case.costs.durations_us[op]["1"] for op in alike)
        assert any(
            case.costs.durations_us[op]["1"] == longest_us
            and case.costs.durations_us[op][str(width)] == min(case.costs.durations_us[op].values())
            for op in alike
        )


def test_an_op_type_is_kernel_and_role():
    """One kernel makes both gradients of a convolution; to the paper these are two types of ops."""
    ops = (Op("x", "conv_backward", "activation_grad"), Op("w", "conv_backward", "weight_grad"))
    costs = Costs({"x": {"1": 9.0, "2": 5.0}, "w": {"1": 3.0, "2": 4.0}})
    graph = Graph(ops)
    instance = instance_of(graph, costs, Device("cpu0", cores=2))
    assert strategy_widths(graph, instance, (1, 2)) == [2, 1]


@given(planned(strategies=[(3,), (1, 3)], lookahead=(0.0,), halves=(False,)))
def test_strategy_3_takes_one_of_the_three_best_widths(case_options_plan):
    case, options, found = case_options_plan
    if options["coarsen_us"] == 0.0:
        for op in case.graph.by_name:
            durations = case.costs.durations_us[op]
            taken_us = durations[str(found.lane_of[op].width)]
            assert sum(us < taken_us for us in durations.values()) < 3


@given(planned(strategies=[(2, 3), (1, 2, 3), (1, 2, 3, 4)], lookahead=(0.0,), halves=(False,)))
def test_strategy_3_departs_from_strategy_2_by_two_threads_at_most(case_options_plan):
    case, options, found = case_options_plan
    if options["coarsen_us"] == 0.0:
        instance = instance_of(case.graph, case.costs, case.device)
        usual = strategy_widths(case.graph, instance, (1, 2))
        for op, width in zip(case.graph.ops, usual, strict=True):
            assert abs(found.lane_of[op.name].width - width) <= 2


def test_candidates_by_hand():
    rows = {"a": [9.0, 5.0, 3.0, 2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    costs = Costs({op: {str(w): us for w, us in enumerate(row, 1)} for op, row in rows.items()})
    instance = instance_of(Graph((Op("a"), Op("b"))), costs, Device("cpu0", cores=6))
    assert strategy_candidates(instance, [4, 1], (3,)) == [[3, 4, 5], [1, 2, 3]]
    assert strategy_candidates(instance, [6, 6], (1, 2, 3)) == [[4, 5], [6]]
    assert strategy_candidates(instance, [6, 1], (1, 2, 3), halves=True) == [[3, 4, 5], [1, 2, 3]]


def test_two_wide_ops_run_side_by_side_at_half_their_width():
    """The two convolutions of Table III, with the losses at 34 threads that the paper gives for each."""
    graph = Graph((Op("filter"), Op("input")))
    costs = Costs({"filter": {"34": 25.375, "68": 20.3}, "input": {"34": 22.932, "68": 19.6}})
    machine = Machine.of(cores=68)
    options = {"planner": "concurrency", "lookahead_ms": 0.0, "coarsen_us": 0.0, "wait_us": 0.0}
    usual = plan(graph, costs, machine, **options)
    assert [lane.width for lane in usual.lanes] == [68]
    halved = plan(graph, costs, machine, halves=True, **options)
    assert [lane.width for lane in halved.lanes] == [34, 34]
    took_us = [simulate(graph, each, costs, machine).makespan_us for each in (usual, halved)]
    assert took_us[0] / took_us[1] == pytest.approx(1.57, abs=0.01)
    assert plan(graph, costs, machine, halves=True, avoid=[("filter", "input")], **options).lanes[0].width == 68


@given(planned(strategies=[(1, 2, 3, 4), (3, 4)]))
def test_siblings_only_where_the_machine_has_them(case_options_plan):
    case, _, found = case_options_plan
    if case.device.smt == 1:
        assert all(core < case.device.cores for lane in found.lanes for core in lane.cores)


@given(planned(strategies=[combination for combination in STRATEGIES if not {3, 4} <= set(combination)]))
def test_siblings_only_with_strategies_3_and_4(case_options_plan):
    case, _, found = case_options_plan
    assert all(core < case.device.cores for lane in found.lanes for core in lane.cores)


def test_strategy_4_puts_small_ops_on_siblings():
    graph = Graph(tuple(Op(name) for name in ("wide", "a", "b")), (Edge("a", "b"),))
    costs = Costs({"wide": {"1": 400.0, "4": 100.0}, "a": {"1": 30.0, "4": 30.0}, "b": {"1": 30.0, "4": 30.0}})
    machine = Machine.of(cores=4, smt=2, smt_speedup=1.5)
    options = {"planner": "concurrency", "lookahead_ms": 0.0, "coarsen_us": 0.0, "wait_us": 0.0}
    found = plan(graph, costs, machine, strategies=(1, 2, 3, 4), **options)
    assert {min(found.lane_of[op].cores) >= 4 for op in "ab"} == {True}
    assert found.lane_of["wide"].cores == (0, 1, 2, 3)
    makespans = {
        strategies: simulate(graph, plan(graph, costs, machine, strategies=strategies, **options), costs, machine)
        for strategies in ((1, 2, 3), (1, 2, 3, 4))
    }
    assert makespans[1, 2, 3].makespan_us == 160.0
    assert makespans[1, 2, 3, 4].makespan_us == pytest.approx(40 + 40 + 40)


@settings(max_examples=30)
@given(moldable_cases(max_ops=12), st.sampled_from([0.0, 5.0]))
def test_looking_ahead_is_never_longer_than_the_strategies_nor_than_serial(case, wait_us):
    plans = [
        made(case, lookahead_ms=5.0, wait_us=wait_us),
        made(case, lookahead_ms=0.0, wait_us=wait_us),
        plan(case.graph, case.costs, case.machine, planner="serial"),
    ]
    ahead, strategies, serial = (
        simulate(case.graph, found, case.costs, case.machine, wait_us).makespan_us for found in plans
    )
    assert ahead <= min(strategies, serial)


def test_pairs_of_ops_that_are_not_there_or_in_one_action_are_no_matter():
    graph, costs = Graph((Op("a"), Op("b")), (Edge("a", "b"),)), Costs({op: {"1": 5.0} for op in "ab"})
    usual = plan(graph, costs, Machine.of(cores=2), planner="concurrency")
    assert usual == plan(
        graph, costs, Machine.of(cores=2), planner="concurrency", avoid=[("a", "b"), ("a", "gone"), ("a", "a")]
    )


def test_avoiding_what_ran_side_by_side_runs_it_one_after_the_other():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 50.0, "2": 45.0} for op in "ab"})
    usual = plan(graph, costs, Machine.of(cores=2), planner="concurrency")
    assert simulate(graph, usual, costs, Machine.of(cores=2)).makespan_us == 50.0
    apart = plan(graph, costs, Machine.of(cores=2), planner="concurrency", avoid=[("b", "a")])
    assert simulate(graph, apart, costs, Machine.of(cores=2)).makespan_us == 90.0


def test_the_first_cpu_device_is_planned_for():
    machine = Machine((Device("gpu0", "cuda"), Device("n1", cores=2), Device("n2", cores=8)))
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 50.0, "2": 45.0} for op in "ab"})
    found = plan(graph, costs, machine, planner="concurrency")
    check(graph, found, machine)
    assert {lane.device for lane in found.lanes} == {"n1"}
    with pytest.raises(InputError, match="at least one cpu device"):
        plan(graph, costs, Machine((Device("gpu0", "cuda"),)), planner="concurrency")


def test_no_ops_and_no_costs():
    empty = plan(Graph(()), Costs({}), Machine.of(cores=2), planner="concurrency")
    assert replace(empty, lanes=()).lanes == empty.lanes
    with pytest.raises(InputError, match="no duration for op 'a'"):
        plan(Graph((Op("a"),)), Costs({}), Machine.of(cores=2), planner="concurrency")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": (1, 5)}, r"expected strategies out of 1, 2, 3, 4, got \[1, 5\]"),
        ({"strategies": ("1",)}, "expected strategies out of 1, 2, 3, 4"),
        ({"lookahead_ms": -1.0}, "expected lookahead_ms >= 0, got -1.0"),
        ({"coarsen_us": float("nan")}, "expected coarsen_us >= 0, got nan"),
        ({"wait_us": float("inf")}, "expected wait_us >= 0, got inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        plan(Graph(()), Costs({}), Machine.of(cores=2), planner="concurrency", **options)
