"""Assistants: what they decide, that they end, and what they win back from a hog in simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.adaptation.assistant_rules import AssistantRules, RuledFlow, RuledOp, assistant_rules
from hocket.adaptation.assistants import (
    DeviceShare,
    OpMove,
    decide,
    order_of,
    predicted_loads_us,
    predicted_step_us,
    shares_of,
    transfer_delay,
)
from hocket.ir import Buffer, Costs, Edge, Graph, Link, Machine, Op, Span, Timeline
from hocket.ir.machine import Device
from support.refusals import refused

from .assisted import HOG_FROM, assisted, branches, devices, micro_batches, wide

GRAPHS = {"wide": wide, "branches": branches, "micro-batches": micro_batches}
EQUAL = {name: RuledOp(name, "compute", (5.0, 5.0)) for name in "abcdef"}
BUSY, IDLE = DeviceShare(compute=1.0, slowdown=2.0), DeviceShare(compute=0.5)


@pytest.mark.parametrize(
    ("graph", "count", "steps"),
    [
        ("micro-batches", 3, 60),
        *(pytest.param(graph, count, 240, marks=pytest.mark.slow) for graph in GRAPHS for count in (2, 3, 4)),
    ],
)
def test_at_least_half_of_what_a_hog_takes_is_won_back_in_20_steps(graph, count, steps):
    found = assisted(*GRAPHS[graph](), devices(count), steps=steps)
    idle_us, hogged_us, later_us = (found.steps_us[step] for step in (0, HOG_FROM, HOG_FROM + 20))
    assert hogged_us > 1.3 * idle_us
    assert hogged_us - later_us >= 0.5 * (hogged_us - idle_us)
    assert found.moves_from(0) == found.moves_from(HOG_FROM)  # none before
    assert found.moves_from(HOG_FROM + 20) <= 2
    assert max(found.steps_us[HOG_FROM + 20 :]) <= later_us * 1.001


def test_without_assistants_nothing_is_won_back():
    found = assisted(*branches(), devices(2), steps=20, margin=0.99)
    assert not found.moves
    assert found.steps_us[-1] == found.steps_us[HOG_FROM] > 1.3 * found.steps_us[0]


@st.composite
def situations(draw):
    devices = draw(st.integers(2, 4))
    count = draw(st.integers(1, 14))
    takes = st.tuples(*[st.integers(1, 50).map(float)] * devices)
    resource = st.sampled_from(["compute", "memory", "network"])
    ops = tuple(RuledOp(f"op{n}", draw(resource), draw(takes), draw(st.integers(0, 10)) * 1e3) for n in range(count))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=20))
    flows = tuple(
        RuledFlow(a, b, float(draw(st.integers(0, 30)))) for a, b in sorted({p for p in pairs if p[0] < p[1]})
    )
    part = st.floats(0, 1)
    shares = tuple(
        DeviceShare(draw(part), draw(part), draw(part), draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])))
        for _ in range(devices)
    )
    assignment = tuple(draw(st.integers(0, devices - 1)) for _ in range(count))
    return AssistantRules(tuple(f"d{n}" for n in range(devices)), ops, flows), shares, assignment


@given(situations())
def test_moves_are_the_same_everywhere_end_and_make_nothing_worse(situation):
    rules, shares, assignment = situation
    slowdown = [share.slowdown for share in shares]
    now, decisions = list(assignment), 0
    while moves := decide(shares, rules, now):
        assert moves == decide(tuple(shares), rules, tuple(now))  # of the numbers alone
        before = now.copy()
        for move in moves:
            op = rules.ops[move.op]
            assert now[move.op] == move.source != move.target
            assert shares[move.source].of(op.resource) > rules.theta >= shares[move.target].of(op.resource)
            now[move.op] = move.target
        assert max(predicted_loads_us(rules, now, slowdown)) <= max(predicted_loads_us(rules, before, slowdown)) + 1e-6
        was, becomes = predicted_step_us(rules, before, slowdown), predicted_step_us(rules, now, slowdown)
        assert becomes <= (1 - rules.margin) * was + 1e-9
        decisions += 1
        assert decisions <= 100  # each takes three percent off


@settings(max_examples=40)
@given(situations())
def test_the_order_is_complete_and_waits_for_what_is_needed(situation):
    rules, shares, assignment = situation
    order = order_of(rules, assignment, [share.slowdown for share in shares])
    place = {op: number for number, op in enumerate(order)}
    assert sorted(order) == list(range(len(rules.ops)))
    assert all(place[flow.source] < place[flow.reader] for flow in rules.flows)


def test_thresholds_decide_who_gives_and_takes():
    rules = AssistantRules(("x", "y"), tuple(EQUAL.values()))
    part = (0, 0, 0, 1, 1, 1)
    assert decide((BUSY, IDLE), rules, part) == (OpMove(0, 0, 1),)
    assert decide((DeviceShare(compute=0.95, slowdown=2.0), IDLE), rules, part) == ()  # not above theta
    assert decide((BUSY, DeviceShare(compute=0.96)), rules, part) == ()  # nobody takes
    memory = AssistantRules(("x", "y"), tuple(op._replace(resource="memory") for op in EQUAL.values()))
    assert decide((BUSY, IDLE), memory, part) == ()  # no op is bound by what is used up
    three = AssistantRules(("x", "y", "z"), tuple(op._replace(takes_us=(5.0, 5.0, 5.0)) for op in EQUAL.values()))
    (move, *_) = decide((BUSY, DeviceShare(compute=0.6), DeviceShare(compute=0.4)), three, (0, 0, 0, 0, 1, 2))
    assert move.target == 2  # below gamma first


def test_prices_keep_work_where_it_is():
    part = (0, 0, 0, 1, 1, 1)
    heavy = tuple(op._replace(state_bytes=1e9) for op in EQUAL.values())
    assert decide((BUSY, IDLE), AssistantRules(("x", "y"), heavy), part) == ()
    assert decide((BUSY, IDLE), AssistantRules(("x", "y"), heavy, horizon_steps=1_000_000), part) != ()
    fixed = tuple(op._replace(is_movable=False) for op in EQUAL.values())
    assert decide((BUSY, IDLE), AssistantRules(("x", "y"), fixed), part) == ()
    just_moved = (BUSY, DeviceShare(compute=0.5, steps=1))
    assert decide(just_moved, AssistantRules(("x", "y"), tuple(EQUAL.values())), part) == ()


def test_what_a_step_takes_longer_is_put_down_to_transfers():
    ops = tuple(RuledOp(name, "compute", (5.0, 5.0)) for name in "abcd")
    flows = (RuledFlow(0, 1, 2.0), RuledFlow(1, 2, 2.0), RuledFlow(2, 3, 2.0))
    rules, part = AssistantRules(("x", "y"), ops, flows), (0, 1, 1, 0)
    shares = (DeviceShare(compute=1.0), DeviceShare(compute=0.5))
    assert transfer_delay(shares, rules, part) == 1.0  # nobody says how long a step took
    assert predicted_step_us(rules, part, (1.0, 1.0)) == 24.0
    slow = [DeviceShare(compute=1.0, step_us=step_us) for step_us in (60.0, 40.0)]
    assert transfer_delay(slow, rules, part) == pytest.approx(10.0, rel=0.1)
    assert transfer_delay(slow, rules, (0, 0, 0, 0)) == 1.0  # there are none
    shorter = [DeviceShare(compute=1.0, step_us=10.0)] * 2
    assert transfer_delay(shorter, rules, part) == 1.0


def test_units_move_whole_and_count_once():
    ops = tuple(RuledOp(f"{unit}{n}", "compute", (5.0, 5.0), unit=unit) for unit in "abcdef" for n in range(2))
    rules = AssistantRules(("x", "y"), ops, max_moves=1)
    part = (0,) * 6 + (1,) * 6
    moves = decide((BUSY, IDLE), rules, part)
    assert moves == (OpMove(0, 0, 1), OpMove(1, 0, 1))
    # A unit on two devices moves with its part on the giver, or not at all if an op may not move.
    assert decide((BUSY, IDLE), rules, (1, *part[1:])) == (OpMove(1, 0, 1),)
    fixed = tuple(op._replace(is_movable=op.name != "a1") for op in ops)
    assert all(ops[move.op].unit != "a" for move in decide((BUSY, IDLE), AssistantRules(("x", "y"), fixed), part))


def test_a_pause_is_a_price_too():
    part = (0, 0, 0, 1, 1, 1)
    assert decide((BUSY, IDLE), AssistantRules(("x", "y"), tuple(EQUAL.values()), migration_us=999.0), part) != ()
    assert decide((BUSY, IDLE), AssistantRules(("x", "y"), tuple(EQUAL.values()), migration_us=2000.0), part) == ()


def test_what_units_write_moves_with_them():
    weights = (Buffer("w", 400.0, "lasting"), Buffer("m", 8.0, "lasting"))
    ops = (
        Op("f", reads=("w",)),
        Op("scale", reads=("m",), writes=("m",)),
        Op("update", reads=("w", "m"), writes=("w", "m")),
    )
    graph = Graph(ops, (Edge("f", "scale", 1.0), Edge("scale", "update", 1.0)), buffers=weights)
    costs, machine = Costs({op.name: {"1": 7.0} for op in ops}), Machine((Device("x"), Device("y")))
    alone = assistant_rules(graph, costs, machine)
    assert [op.is_movable for op in alone.ops] == [True, False, False]
    rules = assistant_rules(graph, costs, machine, units=[("f",), ("scale", "update")])
    assert [op.unit for op in rules.ops] == ["", "scale", "scale"]
    assert all(op.is_movable for op in rules.ops)
    assert sum(op.state_bytes for op in rules.ops) == 408.0  # each once


def test_rules_are_the_rooflines():
    machine = Machine((Device("x", flops_per_s=1e9, bytes_per_s=1e9), Device("y")), (Link("x", "y", 1e6, 5.0),))
    weights = (Buffer("w", 400.0, "lasting"), Buffer("s", 8.0, "lasting"))
    ops = (
        Op("product", flops=1e6, size_bytes=1e3),
        Op("sum", flops=1e3, size_bytes=1e5),
        Op("update", flops=10.0, size_bytes=1e3, reads=("w",), writes=("w", "s")),
        Op("count", size_bytes=8.0, writes=("s",)),
    )
    graph = Graph(ops, (Edge("product", "sum", 1.0), Edge("sum", "update", 1e4)), buffers=weights)
    costs = Costs({op.name: {"1": 7.0} for op in ops})
    rules = assistant_rules(graph, costs, machine, gamma=0.4)
    assert [op.resource for op in rules.ops] == ["compute", "network", "network", "memory"]
    assert [op.state_bytes for op in rules.ops] == [0.0, 0.0, 408.0, 8.0]
    assert [op.is_movable for op in rules.ops] == [True, True, False, False]
    assert rules.flows[0] == RuledFlow(0, 1, 6.0)
    assert (rules.gamma, rules.state_bytes_per_s) == (0.4, 1e6)


def test_shares_come_from_a_timeline():
    rules = AssistantRules(("x", "y"), (EQUAL["a"], EQUAL["b"]._replace(resource="memory")))
    timeline = Timeline((Span("a", "x", 0.0, 10.0), Span("b", "y", 10.0, 15.0)), ("x", "y"), "measured")
    first, second = shares_of(timeline, rules, activity={"x": 0.98}, steps=3)
    assert (first.compute, first.slowdown, first.steps) == (0.98, 2.0, 3)
    assert (second.compute, second.memory, second.slowdown) == pytest.approx((1 / 3, 1 / 3, 1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AssistantRules(("x",), (), gamma=0.99), "0 < gamma < theta < 1"),
        (lambda: AssistantRules(("x",), (), max_moves=0), "of at least 1"),
        (lambda: AssistantRules(("x",), (), migration_us=-1.0), "a migration_us from 0 on"),
        (lambda: AssistantRules(("x",), (EQUAL["a"],)), "op 'a' needs a time on each of 1 devices"),
        (lambda: AssistantRules(("x", "y"), (EQUAL["a"],), (RuledFlow(0, 0, 1.0),)), "a flow goes onward among 1 ops"),
        (lambda: DeviceShare(compute=1.5), "shares between 0 and 1"),
        (lambda: DeviceShare(compute=0.5, slowdown=0.0), "a slowdown above 0"),
        (lambda: DeviceShare(compute=0.5, step_us=-1.0), "step_us from 0 on"),
        (lambda: decide((BUSY,), AssistantRules(("x", "y"), ()), ()), "rules of 2 devices and 0 ops, got shares of 1"),
    ],
)
def test_numbers_that_make_no_sense(make, message):
    refused(message, make)
