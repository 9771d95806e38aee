"""Which pairs interfered: against a check by hand, and on timelines where the interference was put in on purpose."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.adaptation import CoRun, co_runs, interfering
from hocket.errors import InputError
from hocket.ir import Costs, Lane, Plan, Span, Timeline
from strategies import costs_of, graphs

TWO = Plan((Lane("x", ("a", "c"), cores=(0,)), Lane("y", ("b", "d"), cores=(1,))))
# Alone on one core 100 us each, on both cores 60.
COSTS = Costs({op: {"1": 100.0, "2": 60.0} for op in "abcd"})


def step(*spans: tuple[str, str, float, float], lanes=("x", "y")) -> Timeline:
    return Timeline(tuple(Span(*span) for span in spans), lanes, "measured")


def side_by_side(us: float, other_us: float | None = None) -> Timeline:
    return step(("a", "x", 0.0, us), ("b", "y", 0.0, us if other_us is None else other_us))


@pytest.mark.parametrize(
    ("us", "interfered"), [(100.0, False), (115.0, False), (119.0, False), (125.0, True), (300.0, True)]
)
def test_two_ops_interfere_when_they_would_be_faster_in_turn(us, interfered):
    # In turn, each on both cores, the same work takes 60 + 60 us.
    (pair,) = co_runs([side_by_side(us)], TWO, COSTS)
    assert pair.overlap_us == us
    assert pair.in_turn_us == pytest.approx(120.0)
    assert pair.gain_us == pytest.approx(120.0 - us)
    assert pair.first_slowdown == pair.second_slowdown == us / 100
    assert pair.interfered == interfered
    assert interfering([pair]) == ((("a", "b"),) if interfered else ())


def test_what_is_better_run_in_turn_by_its_costs_alone_is_no_interference():
    costs = Costs({"a": {"1": 100.0, "2": 40.0}, "b": {"1": 100.0, "2": 40.0}})
    (pair,) = co_runs([side_by_side(101.0)], TWO, costs)
    assert not pair.faster_together
    assert not pair.interfered, "no op was slowed: the planner knew what it did"


def test_a_partner_that_was_not_slowed_is_not_blamed():
    # a is slowed by c; then it still runs beside d, which goes as fast as ever.
    plan = Plan((Lane("x", ("a",)), Lane("y", ("c", "d"))))
    timeline = step(("a", "x", 0.0, 390.0), ("c", "y", 0.0, 290.0), ("d", "y", 290.0, 390.0))
    assert interfering(co_runs([timeline], plan, COSTS)) == (("a", "c"),)


def test_the_cores_of_both_lanes_are_what_taking_turns_is_held_against():
    # Four lanes of two cores: in turn, a and b would have four cores, not all eight.
    lanes = [Lane(f"l{n}", (op,), width=2, cores=(2 * n, 2 * n + 1)) for n, op in enumerate("abcd")]
    costs = Costs({op: {"1": 180.0, "2": 100.0, "4": 60.0, "8": 40.0} for op in "abcd"})
    timeline = step(*((op, f"l{n}", 0.0, 110.0) for n, op in enumerate("abcd")), lanes=("l0", "l1", "l2", "l3"))
    found = co_runs([timeline], Plan(tuple(lanes)), costs)
    assert len(found) == 6
    assert all(pair.in_turn_us == pytest.approx(120.0) for pair in found)
    assert interfering(found) == ()


def test_a_spread_of_the_costs_is_no_interference():
    # Alone, the median is 130 us: the minimum that the costs keep is reached now and then only.
    noisy = Costs({op: {"1": 100.0, "2": 60.0} for op in "ab"}, {op: {"1": 30.0, "2": 18.0} for op in "ab"})
    assert interfering(co_runs([side_by_side(130.0)], TWO, noisy)) == ()
    assert interfering(co_runs([side_by_side(170.0)], TWO, noisy)) == (("a", "b"),)


def test_one_bad_step_and_one_chance_meeting_do_not_count():
    good, bad = side_by_side(100.0), side_by_side(500.0)
    assert interfering(co_runs([good, good, bad, good, good], TWO, COSTS)) == ()
    assert interfering(co_runs([good, bad, bad, good, bad], TWO, COSTS)) == (("a", "b"),)
    chance = step(("a", "x", 0.0, 300.0), ("d", "y", 0.0, 300.0))
    apart = step(("a", "x", 0.0, 100.0), ("d", "y", 100.0, 200.0))
    assert co_runs([chance, apart, apart], TWO, COSTS) == ()
    assert co_runs([chance, chance, apart], TWO, COSTS) != ()


def test_short_meetings_and_touching_ops_are_left_out():
    touching = step(("a", "x", 0.0, 100.0), ("b", "y", 100.0, 200.0))
    assert co_runs([touching], TWO, COSTS) == ()
    short = step(("a", "x", 0.0, 100.0), ("b", "y", 97.0, 200.0))
    assert co_runs([short], TWO, COSTS) == ()
    long = step(("a", "x", 0.0, 100.0), ("b", "y", 95.0, 200.0))
    assert len(co_runs([long], TWO, COSTS)) == 1


def test_only_lanes_of_cores_of_one_device_meet():
    elsewhere = Plan((Lane("x", ("a",)), Lane("y", ("b",), device="cpu1")))
    channel = Plan((Lane("x", ("a",)), Lane("y", ("b",), "channel", "server0->cpu0")))
    for plan in (elsewhere, channel):
        assert co_runs([side_by_side(300.0)], plan, COSTS) == ()


def test_bad_input_is_named():
    with pytest.raises(InputError, match="'e' of the timeline is run by no lane"):
        co_runs([step(("e", "x", 0.0, 1.0))], TWO, COSTS)
    with pytest.raises(InputError, match="no duration for op 'b'"):
        co_runs([side_by_side(100.0)], TWO, COSTS.restricted("a"))
    assert co_runs([], TWO, COSTS) == ()


@st.composite
def runs(draw) -> tuple[Plan, Costs, list[Timeline]]:
    """A plan on two to four lanes, and up to five steps of it in which ops take whatever they take."""
    graph = draw(graphs(min_ops=2, max_ops=10))
    count = draw(st.integers(2, 4))
    lanes: list[list[str]] = [[] for _ in range(count)]
    for op in graph.ops:
        lanes[draw(st.integers(0, count - 1))].append(op.name)
    widths = [draw(st.integers(1, 3)) for _ in lanes]
    plan = Plan(tuple(Lane(f"l{n}", tuple(ops), width=widths[n]) for n, ops in enumerate(lanes)))
    costs = draw(costs_of(graph, widths=4))
    times = st.integers(0, 400)
    timelines = []
    for _ in range(draw(st.integers(1, 5))):
        spans = []
        for lane in plan.lanes:
            now = 0
            for op in lane.ops:
                start = now + draw(times)
                now = start + draw(times)
                spans.append(Span(op, lane.name, float(start), float(now)))
        timelines.append(Timeline(tuple(draw(st.permutations(spans))), tuple(lane.name for lane in plan.lanes)))
    return plan, costs, timelines


def overlaps_us(timeline: Timeline) -> dict[frozenset[str], float]:
    found = {}
    for one in timeline.spans:
        for other in timeline.spans:
            if one.lane != other.lane:
                both = min(one.end_us, other.end_us) - max(one.start_us, other.start_us)
                if both > 0 and one.duration_us > 0 and other.duration_us > 0:
                    found[frozenset((one.op, other.op))] = both
    return found


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@given(runs())
def test_the_pairs_and_their_overlaps_are_those_of_brute_force(case):
    plan, costs, timelines = case
    each = [overlaps_us(timeline) for timeline in timelines]
    expected = {}
    for pair in {pair for found in each for pair in found}:
        seen = [found[pair] for found in each if pair in found]
        if len(seen) > len(timelines) / 2 and middle(seen) >= 5.0:
            expected[pair] = middle(seen)
    found = co_runs(timelines, plan, costs)
    assert {frozenset(pair.ops): pair.overlap_us for pair in found} == expected
    assert list(found) == sorted(found, key=lambda pair: (pair.gain_us, pair.ops))


@given(runs())
def test_what_interfered_was_slowed_and_not_faster_together(case):
    plan, costs, timelines = case
    found = co_runs(timelines, plan, costs)
    avoid = interfering(found)
    assert len(set(avoid)) == len(avoid)
    for pair in found:
        assert (pair.ops in avoid) == (
            pair.in_turn_us <= pair.overlap_us and min(pair.first_slowdown, pair.second_slowdown) >= 1.05
        )


@given(st.integers(2, 8), st.floats(2.5, 20.0), st.randoms(use_true_random=False))
def test_a_planted_pair_is_found_among_good_ones(pairs: int, factor: float, chance: random.Random):
    """Ops in pairs side by side; one pair is slowed in every step, and in some steps others are by bad luck."""
    bad = chance.randrange(pairs)
    left, right = ([f"{side}{n}" for n in range(pairs)] for side in "ab")
    plan = Plan((Lane("x", tuple(left)), Lane("y", tuple(right))))
    costs = Costs({op: {"1": 100.0, "2": 60.0} for op in (*left, *right)})
    timelines = []
    unlucky = [chance.randrange(pairs) for _ in range(5)]
    assume(max(unlucky.count(n) for n in range(pairs)) < 3)
    for luck in unlucky:
        now, spans = 0.0, []
        for n in range(pairs):
            us = 100.0 * chance.uniform(1.0, 1.04) * (factor if n in (bad, luck) else 1.0)
            spans += [Span(left[n], "x", now, now + us), Span(right[n], "y", now, now + us)]
            now += us
        timelines.append(Timeline(tuple(spans), ("x", "y"), "measured"))
    assert interfering(co_runs(timelines, plan, costs)) == ((f"a{bad}", f"b{bad}"),)


def test_gains_come_last():
    good, bad = CoRun("a", "b", 100.0, 150.0, 1.0, 1.0), CoRun("a", "c", 100.0, 50.0, 2.0, 2.0)
    worse = CoRun("a", "d", 100.0, 20.0, 2.0, 2.0)
    assert interfering([good, bad, worse]) == (("a", "d"), ("a", "c"))
