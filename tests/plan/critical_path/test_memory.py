"""Peaks: exact where there is one order, never too small where there are many, and kept within a limit."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.check import check
from hocket.ir import Graph, Lane, Plan
from hocket.plan.critical_path.frugal import frugal_order
from hocket.plan.critical_path.memory import held_back, peak_bytes, serial_peak_bytes
from hocket.plan.critical_path.streams import streams_of
from invariants import direct_waits, held_bytes
from plan.critical_path.examples import MB, network
from strategies import plans_of, touching_graphs


def one_lane(order) -> Plan:
    return Plan((Lane("all", tuple(order)),))


def in_streams(graph: Graph, **options) -> tuple[Plan, tuple[str, ...], set[str]]:
    streams = streams_of(graph, dict.fromkeys(graph.by_name, 1.0), **options)
    lanes = tuple(Lane(f"{task}{rank}", tuple(ops)) for (task, rank), ops in streams.lanes().items())
    return Plan(lanes), streams.order, set(graph.by_name) - set(streams.spine.ops)


@given(graph=touching_graphs())
def test_on_one_lane_it_is_what_counting_says(graph):
    for order in (graph.order, frugal_order(graph)):
        expected = max(held_bytes(graph, [(op, "start") if n else (op, "end") for op in order for n in (1, 0)]))
        assert abs(serial_peak_bytes(graph, order) - expected) <= 1e-6 * expected
        assert abs(peak_bytes(graph, one_lane(order)) - expected) <= 1e-6 * expected
        assert peak_bytes(graph, one_lane(order), 0.3) >= expected * (1 - 1e-9)


@settings(max_examples=200)
@given(data=st.data())
def test_no_run_that_a_plan_allows_holds_more(data):
    graph = data.draw(touching_graphs())
    plan = data.draw(plans_of(graph))
    bound = peak_bytes(graph, plan)
    chance = random.Random(data.draw(st.integers(0, 1000)))
    waits = direct_waits(graph, plan)
    for _ in range(5):
        run, started, ended = [], set(), set()
        while len(ended) < len(waits):
            able = [(op, "start") for op in waits if op not in started and waits[op] <= ended]
            able += [(op, "end") for op in started - ended]
            op, what = chance.choice(sorted(able))
            (started if what == "start" else ended).add(op)
            run.append((op, what))
        assert max(held_bytes(graph, run)) <= bound * (1 + 1e-9)


def test_a_free_plan_may_hold_every_activation_and_gradient():
    graph = network(6)
    plan, order, _ = in_streams(graph)
    eager = serial_peak_bytes(graph)
    assert serial_peak_bytes(graph, order) <= eager + 0.1 * MB
    assert peak_bytes(graph, plan) > eager + 3 * MB


def test_held_back_keeps_the_limit_and_waits_no_more_than_it_must():
    graph = network(6)
    plan, order, side = in_streams(graph)
    eager = serial_peak_bytes(graph)
    assert held_back(graph, plan, order, side, 1e12) is plan
    loose = held_back(graph, plan, order, side, eager + 3 * MB)
    tight = held_back(graph, plan, order, side, eager + 0.5 * MB)
    for held, limit in ((loose, eager + 3 * MB), (tight, eager + 0.5 * MB)):
        check(graph, held)
        assert peak_bytes(graph, held) <= limit
        assert [lane.ops for lane in held.lanes] == [lane.ops for lane in plan.lanes]
    assert 0 < len(loose.after) <= len(tight.after)
    assert held_back(graph, plan, order, side, eager / 2) is None


def test_a_window_keeps_branches_together_where_no_weight_gradient_is_to_blame():
    graph = network(6)
    plan, order, _ = in_streams(graph)
    tight = held_back(graph, plan, order, None, serial_peak_bytes(graph, order) * 1.02)
    check(graph, tight)
    assert peak_bytes(graph, tight) <= serial_peak_bytes(graph, order) * 1.02
    assert len(tight.after) > len(graph) / 3


@given(graph=touching_graphs())
def test_the_frugal_order_is_an_order(graph):
    check(graph, one_lane(frugal_order(graph)))


def test_the_frugal_order_frees_what_it_can_first():
    graph = network(5)
    assert serial_peak_bytes(graph, frugal_order(graph)) <= serial_peak_bytes(graph)
