"""Scattered lanes: the same plan on other cores, legal, as long, and each thread in a cache of its own."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Lane, Machine, Op, Plan, synchronisation
from hocket.ir.placement import scattered, scattered_cores, with_own_cores
from hocket.planning import plan
from hocket.simulation import simulate
from strategies import moldable_cases


@given(cores=st.integers(1, 80), cores_per_cache=st.integers(1, 8))
def test_every_core_is_counted_once_and_the_first_ones_share_no_cache(cores, cores_per_cache):
    order = scattered_cores(Device("cpu0", cores=cores, cores_per_cache=cores_per_cache))
    assert sorted(order) == list(range(cores))
    caches = [core // cores_per_cache for core in order]
    assert len(set(caches[: len(set(caches))])) == len(set(caches))


@given(moldable_cases(max_ops=10, smt=2), st.sampled_from(["list", "phases", "concurrency"]), st.integers(1, 3))
def test_a_scattered_plan_is_legal_and_takes_as_long(case, planner, cores_per_cache):
    (device,) = case.machine.devices
    machine = Machine((replace(device, cores_per_cache=cores_per_cache),))
    options = {"lookahead_ms": 0.0} if planner == "concurrency" else {}
    usual = plan(case.graph, case.costs, machine, planner=planner, **options)
    apart = plan(case.graph, replace(case.costs, placement="scatter"), machine, planner=planner, **options)
    assert apart == scattered(usual, machine)
    assert Plan.parse(str(apart)) == apart
    check(case.graph, apart, machine)
    took_us = [simulate(case.graph, each, case.costs, machine).makespan_us for each in (usual, apart)]
    assert took_us[0] == pytest.approx(took_us[1])
    if cores_per_cache == 1:
        assert apart == usual


@given(
    moldable_cases(max_ops=10, smt=2),
    st.sampled_from(["list", "phases", "concurrency"]),
    st.integers(1, 3),
    st.sampled_from(["compact", "scatter"]),
    st.data(),
)
def test_ops_on_cores_of_their_own_placement_keep_their_order(case, planner, cores_per_cache, placement, data):
    (device,) = case.machine.devices
    machine = Machine((replace(device, cores_per_cache=cores_per_cache),))
    other = {"compact": "scatter", "scatter": "compact"}[placement]
    own = dict.fromkeys(data.draw(st.lists(st.sampled_from([op.name for op in case.graph.ops]), unique=True)), other)
    options = {"lookahead_ms": 0.0} if planner == "concurrency" else {}
    usual = plan(case.graph, replace(case.costs, placement=placement), machine, planner=planner, **options)
    costs = replace(case.costs, placement=placement, placements=own)
    found = plan(case.graph, costs, machine, planner=planner, **options)
    check(case.graph, found, machine)
    assert Plan.parse(str(found)) == found
    before, now = synchronisation(case.graph, usual), synchronisation(case.graph, found)
    names = [op.name for op in case.graph.ops]
    for one, two in itertools.product(names, names):
        assert before.before(one, two) == now.before(one, two), (one, two)
    for op in names:
        assert found.lane_of[op].width == usual.lane_of[op].width
        if found.lane_of[op].cores != usual.lane_of[op].cores:
            assert op in own


def test_an_op_that_runs_alone_gets_a_core_of_each_cache_and_one_beside_others_does_not():
    graph = Graph(tuple(map(Op, "abcd")), (Edge("a", "c"), Edge("b", "c"), Edge("c", "d")))
    lanes = (Lane("cpu0.0-1", ("a", "c", "d"), width=2, cores=(0, 1)), Lane("cpu0.2-3", ("b",), width=2, cores=(2, 3)))
    machine = Machine.of(cores=4, cores_per_cache=2)
    usual = Plan(lanes)
    found = with_own_cores(usual, graph, machine, {"a": "scatter", "c": "scatter"})
    assert {op: found.lane_of[op].cores for op in "abcd"} == {"a": (0, 1), "b": (2, 3), "c": (0, 2), "d": (0, 1)}
    check(graph, found, machine)
    back = with_own_cores(found, graph, machine, {"c": "compact"})
    assert {op: back.lane_of[op].cores for op in "abcd"} == {op: usual.lane_of[op].cores for op in "abcd"}


def test_lanes_lie_apart_and_are_named_after_their_cores():
    graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "c"), Edge("b", "c")))
    costs = Costs({op: {"1": 100.0, "2": 60.0, "4": 60.0} for op in "abc"}, placement="scatter")
    machine = Machine.of(cores=4, cores_per_cache=2)
    found = plan(graph, costs, machine, planner="concurrency", coarsen_us=0.0)
    assert {lane.cores for lane in found.lanes} == {(0, 2), (1, 3)}
    assert {lane.name for lane in found.lanes} == {"cpu0.0+2", "cpu0.1+3"}
