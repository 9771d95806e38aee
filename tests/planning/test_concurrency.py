"""The planner `concurrency`: what each strategy says, and that whatever it makes is legal."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Machine, Op
from hocket.planning import plan
from hocket.planning.concurrency import Corunning, strategy_candidates, strategy_widths
from hocket.planning.moldable.instance import as_plan, instance_of
from hocket.simulation import simulate
from invariants import all_waits, illegality, placement_faults
from strategies import Moldable, decided_cases, instance_by, moldable_cases
from support.refusals import refused

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
    """Siblings are used only with both strategies 3 and 4, and where the machine has them."""
    case, options, found = case_options_plan
    check(case.graph, found, case.machine)
    assert illegality(case.graph, found, case.machine) is None
    assert found.planner == "concurrency"
    if case.device.smt == 1 or not {3, 4} <= set(options["strategies"]):
        assert all(core < case.device.cores for lane in found.lanes for core in lane.cores)


@given(planned())
def test_pairs_to_avoid_are_never_side_by_side_and_no_thread_is_used_twice_at_once(case_options_plan):
    case, options, found = case_options_plan
    waits = all_waits(case.graph, found)
    timeline = simulate(case.graph, found, case.costs, case.machine, options["wait_us"])
    for one, other in options["avoid"]:
        if one != other:
            assert one in waits[other] or other in waits[one]
            spans = sorted((timeline.by_op[op].start_us, timeline.by_op[op].end_us) for op in (one, other))
            assert spans[0][1] <= spans[1][0] * (1 + 1e-9)
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
    instance = instance_by({"a": [9.0, 5.0, 3.0, 2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]})
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


def test_the_first_cpu_device_is_planned_for():
    machine = Machine((Device("gpu0", "cuda"), Device("n1", cores=2), Device("n2", cores=8)))
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 50.0, "2": 45.0} for op in "ab"})
    found = plan(graph, costs, machine, planner="concurrency")
    check(graph, found, machine)
    assert {lane.device for lane in found.lanes} == {"n1"}
    refused("at least one cpu device", plan, graph, costs, Machine((Device("gpu0", "cuda"),)), planner="concurrency")


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
    refused(message, plan, Graph(()), Costs({}), Machine.of(cores=2), planner="concurrency", **options)


@st.composite
def decided(draw):
    _, instance, widths = draw(decided_cases())
    more = st.sets(st.integers(1, instance.num_cores), max_size=2)
    return instance, widths, [sorted(draw(more) | {width}) for width in widths]


@given(decided())
def test_placements_keep_the_rules_and_to_the_candidates(made):
    instance, widths, candidates = made
    placed = Corunning(instance, widths, candidates).run()
    assert placement_faults(instance, placed) == []
    assert all(len(one.cores) in candidates[one.op] for one in placed)


@given(decided(), st.floats(0.5, 2.0))
def test_with_siblings_every_op_runs_once_and_threads_are_never_shared(made, speedup):
    instance, widths, candidates = made
    instance = replace(instance, wait_us=0.0)
    placed = Corunning(instance, widths, candidates, smt_speedup=speedup).run()
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
    placed = Corunning(instance, widths, [[width] for width in widths], smt_speedup=speedup).run()
    machine = Machine.of(cores=case.device.cores, smt=2, smt_speedup=speedup)
    plan = as_plan(case.graph, placed, machine.devices[0], "")
    check(case.graph, plan, machine)
    assert illegality(case.graph, plan, machine) is None
    timeline = simulate(case.graph, plan, case.costs, machine)
    for one in placed:
        span = timeline.by_op[case.graph.ops[one.op].name]
        assert (span.start_us, span.end_us) == pytest.approx((one.start_us, one.end_us), rel=1e-6, abs=1e-6)


def test_the_papers_example():
    """20 idle cores, 1.9 s to go, candidates 18 (1.5 s), 20 (1.3 s) and 16 (2.1 s): 18 is chosen (section III-D)."""
    running = [9.0] * 47 + [1.9] * 21
    ready = [9.0] * 15 + [2.1, 2.0, 1.5, 1.4, 1.3] + [1.3] * 48
    instance = instance_by({"running": running, "ready": ready})
    placed = Corunning(instance, [48, 20], [[48], [16, 18, 20]]).run()
    assert [(one.op, len(one.cores), one.start_us) for one in placed] == [(0, 48, 0.0), (1, 18, 0.0)]


def test_the_most_expensive_op_where_none_fits_in_time():
    instance = instance_by({"long": [9.0, 9.0, 4.0], "a": [5.0, 5.0, 5.0], "b": [6.0, 6.0, 6.0]})
    placed = Corunning(instance, [3, 1, 1], [[1], [1], [1]]).run()
    assert [one.op for one in placed] == [0, 2, 1], "first the most expensive of all"
    instance = instance_by({"a": [3.0, 3.0], "b": [6.0, 6.0], "c": [7.0, 7.0], "d": [8.0, 5.0]})
    placed = Corunning(instance, [1] * 4, [[1], [1], [1], [1]]).run()
    starts = {one.op: one.start_us for one in placed}
    assert starts == {3: 0.0, 2: 0.0, 1: 7.0, 0: 8.0}


def test_what_outlasts_the_running_op_goes_beside_it_only_for_want_of_better():
    """The shorter of two ready ops fits, so the longer one, which would outlast the running op, has to wait."""
    instance = instance_by({"runs": [9.0, 5.0], "longer": [6.0, 6.0], "shorter": [4.0, 4.0]})
    placed = Corunning(instance, [1, 1, 1], [[1], [1], [1]]).run()
    assert [one.op for one in placed] == [0, 1, 2]
    instance = instance_by({"runs": [5.0, 5.0], "longer": [6.0, 6.0], "shorter": [4.0, 4.0], "first": [7.0, 7.0]})
    placed = Corunning(instance, [1] * 4, [[1]] * 4).run()
    assert [one.op for one in placed] == [3, 1, 0, 2]


def test_small_ops_go_to_the_siblings_of_a_full_width_op():
    rows = {"wide": [90.0, 50.0], "small": [10.0, 10.0], "next": [5.0, 5.0], "large": [60.0, 60.0]}
    instance = instance_by(rows, ("small", "next"))
    placed = {one.op: one for one in Corunning(instance, [2, 1, 1, 1], [[2], [1], [1], [1]], smt_speedup=1.25).run()}
    assert placed[3].cores in ((0,), (1,)), "the most expensive one is not as wide as the device"
    rows["large"] = [20.0, 20.0]
    instance = instance_by(rows, ("small", "next"))
    placed = {one.op: one for one in Corunning(instance, [2, 1, 1, 1], [[2], [1], [1], [1]], smt_speedup=1.25).run()}
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
    placed = {one.op: one for one in Corunning(instance, [2, 1, 1], [[2], [2], [2]], smt_speedup=1.25).run()}
    assert placed[0].cores == (0, 1)
    assert min(placed[1].cores) >= 2
    assert placed[2].cores == (0, 1)
