"""Comparisons driven by times that are made up: who takes part how long, and what is found, by plans and in turns."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.autotune.candidate import Candidate
from hocket.autotune.comparison import (
    MAX_ATTEMPTS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    NUM_ROUNDS,
    STEPS_IN_A_ROW,
    StepComparison,
    Turns,
    compare_steps,
    speedup_interval,
)
from hocket.autotune.decision import Decision
from hocket.ir import Lane, Plan, Span, Timeline
from hocket.reporting import lower_quartile

TIMES = st.lists(st.floats(1.0, 100.0), min_size=3, max_size=20)


def candidate(name: str, lanes: int = 1) -> Candidate:
    timeline = Timeline((Span("op0", "lane0", 0.0, 1.0),), tuple(f"lane{n}" for n in range(lanes)), "measured")
    executor: Any = SimpleNamespace(name=name, keeps_time=True, timeline=lambda: timeline)
    plan = Plan(tuple(Lane(f"lane{n}", (f"op{n}",), cores=(n,)) for n in range(lanes)))
    nothing: Any = None
    return Candidate("", nothing, nothing, plan, timeline, executor)


def compared(
    takes_ms: Callable[[str], float], *candidates: Candidate, settling_ms: float = 0.0
) -> tuple[StepComparison, Counter[str]]:
    """The comparison where a step of that name takes so long, and how many steps each made."""
    steps: Counter[str] = Counter()
    backend: Any = SimpleNamespace(release=lambda executor: None)
    search = compare_steps(candidates, backend, lambda: None, settling_ms)
    item = next(search)
    while True:
        name = item.executor.name if item.executor is not None else "eager"
        steps[name] += 1
        try:
            item = search.send(takes_ms(name))
        except StopIteration as end:
            return end.value, steps


def test_who_left_early_is_not_the_best_because_the_machine_was_faster_then():
    """The machine slows down tenfold after the first round, in which "left" was the slowest plan."""
    steps: Counter[str] = Counter()

    def takes_ms(name: str) -> float:
        steps[name] += 1
        slower = 1.0 if steps[name] <= STEPS_IN_A_ROW else 10.0
        return slower * {"eager": 3.0, "stays": 2.0, "left": 4.0}[name]

    found, _ = compared(takes_ms, candidate("left"), candidate("stays"))
    assert [each.executor.name for each in found.candidates] == ["stays", "left"]
    assert found.candidates[1].rank_ms < found.candidates[0].step_ms
    assert found.low <= found.speedup <= found.high


def test_what_is_clear_ends_as_soon_as_it_may():
    found, steps = compared({"eager": 3.0, "a": 2.0, "b": 2.5}.__getitem__, candidate("a"), candidate("b"))
    assert found.is_clear
    assert (found.speedup, found.low, found.high) == (1.5, 1.5, 1.5)
    assert found.best.executor.name == "a"
    assert steps == dict.fromkeys(("eager", "a", "b"), MIN_ROUNDS * STEPS_IN_A_ROW)


@pytest.mark.parametrize(("slowness", "counted"), [(50.0, 3), (100.0, 2), (250.0, 1)])
def test_few_long_steps_are_enough(slowness, counted):
    found, steps = compared(lambda name: slowness * {"eager": 3.0, "a": 2.0}[name], candidate("a"))
    assert found.is_clear
    assert steps["eager"] == MIN_ROUNDS * (counted + 1)


def test_the_hopeless_leave_after_a_round():
    found, steps = compared({"eager": 3.0, "a": 2.0, "b": 2.9}.__getitem__, candidate("a"), candidate("b"))
    assert steps["b"] == STEPS_IN_A_ROW
    assert len(found.candidates) == 2
    assert len(found.candidates[1].steps_ms) == STEPS_IN_A_ROW - 1


def test_what_never_is_clear_goes_on_with_the_best_two_and_says_so():
    noise = itertools.cycle([0.0, 0.3, 0.1, 0.5, 0.2])
    names = ("a", "b", "c")
    found, steps = compared(
        lambda name: {"eager": 3.0, "a": 3.0, "b": 3.02, "c": 3.4}[name] + next(noise), *map(candidate, names)
    )
    assert not found.is_clear
    assert found.low <= 1 <= found.high
    assert steps["eager"] == MAX_ROUNDS * STEPS_IN_A_ROW
    assert sorted(steps[name] for name in names)[0] == MIN_ROUNDS * STEPS_IN_A_ROW


def test_a_plan_that_is_slower_is_clear_too():
    found, _ = compared({"eager": 2.0, "a": 2.5}.__getitem__, candidate("a"))
    assert found.is_clear
    assert found.speedup == pytest.approx(0.8)


def test_the_first_step_of_a_turn_does_not_count():
    turns = itertools.cycle([50.0, 1.0, 1.0, 1.0])
    found, _ = compared(lambda name: next(turns), candidate("a"))
    assert set(found.eager_ms) == {1.0}


@pytest.mark.parametrize(
    ("turn", "settling_ms", "counted"),
    [
        ([44.0, 45.0, 30.0, 2.0, 2.0, 2.0], 100.0, {2.0}),
        ([120.0, 2.0, 2.0, 2.0], 100.0, {2.0}),
        ([9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 2.0], 100.0, {2.0}),  # no more warm-up than four steps
        ([44.0, 45.0, 30.0, 2.0], 0.0, {45.0, 30.0, 2.0}),
    ],
)
def test_steps_count_once_threads_have_settled(turn, settling_ms, counted):
    turns = itertools.cycle(turn)
    found, steps = compared(lambda name: next(turns), candidate("a"), settling_ms=settling_ms)
    assert set(found.eager_ms) == set(found.best.steps_ms) == counted
    assert steps["eager"] % len(turn) == 0


def test_a_promise_is_wider_beside_other_programs():
    alone = Decision("planned", "because", 2.0, 1.1, 2.2)
    assert alone.promised == pytest.approx((1.0, 2.42))
    assert replace(alone, cores_of_others=0.2).promised == alone.promised
    assert replace(alone, cores_of_others=1.0, low=1.2, high=2.0).promised == pytest.approx((1.0, 2.4))
    assert Decision("eager", "because", cores_of_others=1.0).promised is None


def test_timelines_are_kept_where_ops_may_run_side_by_side():
    found, _ = compared({"eager": 3.0, "a": 2.0, "b": 2.1}.__getitem__, candidate("a"), candidate("b", lanes=2))
    assert sorted(len(each.timelines) for each in found.candidates) == [0, MIN_ROUNDS * (STEPS_IN_A_ROW - 1)]


@given(rounds=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6))
def test_an_interval_lies_within_what_was_measured_and_repeats(rounds):
    eager, planned = zip(*rounds, strict=True)
    low, high = speedup_interval(eager, planned)
    assert low <= high
    assert min(map(min, eager)) / max(map(max, planned)) <= low
    assert high <= max(map(max, eager)) / min(map(min, planned))
    assert (low, high) == speedup_interval(eager, planned)


def test_an_interval_knows_that_steps_in_a_row_are_slow_together():
    """One of three rounds was disturbed: nine single steps would say 1.5 with confidence."""
    assert speedup_interval([[3.0] * 3] * 3, [[2.0] * 3, [2.0] * 3, [4.0] * 3]) == (0.75, 1.5)


@given(times=TIMES)
def test_a_quarter_of_the_steps_takes_no_longer(times):
    quartile = lower_quartile(times)
    assert quartile in times
    assert sum(time <= quartile for time in times) >= len(times) / 4


def played(duration_ms: dict[str, float], *, late_ms: float = 0.0) -> tuple[Turns, Counter[str]]:
    """All turns, in which the first step of each block takes longer by `late_ms`, and how many steps each made."""
    found, counts = Turns("old", "new", "seed"), Counter[str]()
    number = 0
    while not found.is_over:
        label = found.contender
        counts[label] += 1
        found.note(duration_ms[label] + (late_ms if number % STEPS_IN_A_ROW == 0 else 0.0))
        number += 1
    return found, counts


@pytest.mark.parametrize(("old_ms", "new_ms", "is_faster"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_one_is_found_whatever_the_first_step_of_a_block_takes(
    old_ms: float, new_ms: float, is_faster: bool
) -> None:
    found, counts = played({"old": old_ms, "new": new_ms}, late_ms=50.0)
    assert found.is_clear
    assert found.is_faster == is_faster
    assert found.speedup == found.low == found.high == old_ms / new_ms
    assert counts == {"old": NUM_ROUNDS * STEPS_IN_A_ROW, "new": NUM_ROUNDS * STEPS_IN_A_ROW}
    assert found.incumbent_ms == (old_ms,) * (NUM_ROUNDS * (STEPS_IN_A_ROW - 1))


def test_what_is_not_clear_is_repeated_and_then_a_draw() -> None:
    found, number = Turns("old", "new", "seed"), 0
    while not found.is_over:
        found.note(1.0 + number * 7 % 5)
        number += 1
    assert number == 2 * MAX_ATTEMPTS * NUM_ROUNDS * STEPS_IN_A_ROW
    assert not found.is_clear
    assert not found.is_faster


def test_a_gain_too_small_to_matter_is_no_gain() -> None:
    found, _ = played({"old": 1.005, "new": 1.0})
    assert not found.is_faster
