"""Peaks: exact where there is one order, never too small where there are many, and kept within a limit."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Graph, Lane, Machine, Plan
from hocket.planning import plan
from hocket.planning.channels import without_transfers
from hocket.planning.critical_path.memory import held_back, min_memory_order, peak_bytes, pool_bytes, serial_peak_bytes
from hocket.planning.critical_path.streams import streams_of
from invariants import direct_waits, held_bytes
from planning.critical_path.examples import MB, gpu_costs, network
from strategies import plans_of, touching_graphs


def one_lane(order) -> Plan:
    return Plan((Lane("all", tuple(order)),))


def in_streams(graph: Graph, order=None, **options) -> tuple[Plan, tuple[str, ...]]:
    streams = streams_of(graph, dict.fromkeys(graph.by_name, 1.0), **options)
    if order is not None:
        streams = replace(streams, order=order)
    lanes = tuple(Lane(f"{task}{rank}", tuple(ops)) for (task, rank), ops in streams.lanes().items())
    return Plan(lanes), streams.order


def most_held_bytes(graph: Graph, plan: Plan, chance: random.Random, runs: int = 5) -> float:
    """The most that is alive in a few random runs that `plan` allows; lanes that overtake each other are likely."""
    waits = direct_waits(graph, plan)
    lane = {op: number for number, of_lane in enumerate(plan.lanes) for op in of_lane.ops}
    most = 0.0
    for _ in range(runs):
        pace = [chance.random() ** 3 for _ in plan.lanes]
        run, started, ended = [], set(), set()
        while len(ended) < len(waits):
            able = [(op, "start") for op in waits if op not in started and waits[op] <= ended]
            able += [(op, "end") for op in started - ended]
            able.sort()
            (event,) = chance.choices(able, [pace[lane[op]] + 1e-9 for op, _ in able])
            (started if event[1] == "start" else ended).add(event[0])
            run.append(event)
        most = max(most, *held_bytes(graph, run), 0.0)
    return most


@given(graph=touching_graphs())
def test_on_one_lane_it_is_what_counting_says(graph):
    for order in (graph.order, min_memory_order(graph)):
        expected = max(held_bytes(graph, [(op, "start") if n else (op, "end") for op in order for n in (1, 0)]))
        assert abs(serial_peak_bytes(graph, order) - expected) <= 1e-6 * expected
        assert abs(peak_bytes(graph, one_lane(order)) - expected) <= 1e-6 * expected


@given(data=st.data())
def test_no_run_that_a_plan_allows_holds_more(data):
    graph = data.draw(touching_graphs())
    plan = data.draw(plans_of(graph))
    held = most_held_bytes(graph, plan, random.Random(data.draw(st.integers(0, 1000))))
    assert held <= peak_bytes(graph, plan) * (1 + 1e-9)


@given(data=st.data())
def test_a_limit_that_the_order_keeps_is_kept_by_every_run(data):
    drawn = data.draw(touching_graphs())
    graph = without_transfers(drawn, [op.name for op in drawn.ops if op.role in ("send", "recv")])
    order = data.draw(st.sampled_from([None, graph.order, min_memory_order(graph)]))
    plan, order = in_streams(graph, order, updates_last=data.draw(st.booleans()))
    least, most = serial_peak_bytes(graph, order), peak_bytes(graph, plan, order)
    limit = least + data.draw(st.floats(0, 1)) * (most - least)
    held, peak = held_back(graph, plan, order, limit)
    check(graph, held)
    assert [lane.ops for lane in held.lanes] == [lane.ops for lane in plan.lanes]
    assert peak <= limit * (1 + 1e-8)
    assert abs(peak_bytes(graph, held, order) - peak) <= 1e-8 * peak
    assert most_held_bytes(graph, held, random.Random(data.draw(st.integers(0, 1000)))) <= peak * (1 + 1e-8)
    if least > 1e-6:
        assert held_back(graph, plan, order, least * 0.999) is None


def test_a_free_plan_may_hold_every_activation_and_gradient():
    graph = network(6)
    plan, order = in_streams(graph)
    eager = serial_peak_bytes(graph)
    assert serial_peak_bytes(graph, order) <= eager + 0.1 * MB
    assert peak_bytes(graph, plan) > eager + 3 * MB


def test_held_back_keeps_the_limit_and_waits_no_more_than_it_must():
    graph = network(6)
    plan, order = in_streams(graph)
    eager = serial_peak_bytes(graph)
    assert held_back(graph, plan, order, 1e12)[0] is plan
    loose, _ = held_back(graph, plan, order, eager + 3 * MB)
    tight, _ = held_back(graph, plan, order, eager + 0.5 * MB)
    assert 0 < len(loose.after) < len(tight.after)
    assert not any(op.startswith(("f", "u")) for op in (*loose.after, *tight.after))
    assert held_back(graph, plan, order, eager / 2) is None


@given(graph=touching_graphs())
def test_the_frugal_order_is_an_order(graph):
    check(graph, one_lane(min_memory_order(graph)))


def test_the_frugal_order_frees_what_it_can_first():
    graph = network(5)
    assert serial_peak_bytes(graph, min_memory_order(graph)) <= serial_peak_bytes(graph)


A100 = Machine.preset("a100")


def test_on_one_stream_it_is_eagers_peak() -> None:
    graph = network(6)
    assert pool_bytes(graph, Plan((Lane("s", graph.order),))) == pytest.approx(serial_peak_bytes(graph))


@pytest.mark.parametrize("seed", range(20))
def test_more_streams_never_need_less_than_what_is_alive_at_once(seed: int) -> None:
    graph, chance = network(5), random.Random(seed)
    lanes: list[list[str]] = [[], [], []]
    for name in graph.order:
        chance.choice(lanes).append(name)
    made = Plan(tuple(Lane(f"s{n}", tuple(ops)) for n, ops in enumerate(lanes)))
    allocated = sum(buffer.size_bytes for buffer in graph.buffers)
    assert serial_peak_bytes(graph) * 0.9 <= pool_bytes(graph, made) <= allocated


@pytest.mark.parametrize("limit", [1.0, 1.05, 1.1, 1.3])
def test_a_plan_on_a_gpu_keeps_its_limit_in_pools(limit: float) -> None:
    graph = network(12)
    eager_bytes = serial_peak_bytes(graph)
    made = plan(graph, gpu_costs(graph), A100, planner="critical-path", peak_limit_bytes=limit * eager_bytes)
    assert pool_bytes(graph, made) <= limit * eager_bytes * (1 + 1e-6)
    assert made.peak_bytes == pytest.approx(pool_bytes(graph, made), abs=1.0)
