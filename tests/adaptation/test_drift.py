"""When to look again: on a change that lasts, not on noise, and never often."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.adaptation import Drift, DriftDetector, DriftLimits
from support.refusals import refused

LIMITS = DriftLimits(factor=1.3, window=10, patience=3, rest_steps=100, max_share=0.05)


def first_drift(watch: DriftDetector, times_ms) -> tuple[int, Drift] | None:
    return next(((number, drift) for number, ms in enumerate(times_ms, 1) if (drift := watch.observe(ms))), None)


chance = random.Random(1)
BURST = LIMITS.window * (LIMITS.patience - 1)
NO_DRIFT = {
    "steady": [2.0 * chance.uniform(0.85, 1.25) for _ in range(20_000)],
    "a change that passes": ([2.0] * 100 + [9.0] * BURST) * 42,
    "up and down in turn": [2.0] * 100 + ([9.0] * 20 + [0.5] * 20) * 50,
    "single slow steps": [2.0, 90.0, 2.0, 2.0] * 1000,
}


@pytest.mark.parametrize("name", NO_DRIFT)
def test_what_lasts_in_no_direction_is_no_drift(name):
    assert first_drift(DriftDetector(2.0, 0.0, LIMITS), NO_DRIFT[name]) is None


@pytest.mark.parametrize("factor", [1.5, 4.0, 0.6, 0.1])
def test_a_change_that_lasts_is_drift_in_either_direction(factor):
    watch = DriftDetector(2.0, 0.0, LIMITS)
    number, drift = first_drift(watch, itertools.chain([2.0] * 200, itertools.repeat(2.0 * factor)))
    assert number == 200 + LIMITS.patience * LIMITS.window
    assert drift == Drift(2.0, 2.0 * factor, 30)
    assert str(drift) == f"step time went from 2 ms to {2 * factor:.3g} ms (over the last 30 steps)"


def test_a_step_that_settles_below_what_the_contest_measured_is_expected_there():
    watch = DriftDetector(4.0, 0.0, LIMITS)
    assert first_drift(watch, [2.0] * 3000) is None
    assert watch.expected_ms == 2.0
    assert first_drift(watch, [4.0] * 100) is not None, "and from there it may drift"


def test_a_step_that_begins_above_what_the_contest_measured_drifts():
    number, drift = first_drift(DriftDetector(2.0, 0.0, LIMITS), itertools.repeat(3.0))
    assert (number, drift.expected_ms) == (LIMITS.rest_steps, 2.0)


def test_the_search_must_have_been_a_small_share_of_the_time_since():
    # 500 ms of search at 5%: not before 10 s have passed, of 2 ms and then 3 ms each.
    number, _ = first_drift(DriftDetector(2.0, 500.0, LIMITS), itertools.chain([2.0] * 1000, itertools.repeat(3.0)))
    assert number == pytest.approx(1000 + 8000 / 3, abs=LIMITS.window)


@given(
    st.lists(st.floats(0.0, 1e4), min_size=1, max_size=400),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
    st.builds(
        DriftLimits,
        factor=st.floats(1.01, 5),
        window=st.integers(1, 5),
        patience=st.integers(1, 3),
        rest_steps=st.integers(1, 50),
        max_share=st.floats(0.01, 1),
    ),
)
def test_whatever_the_times_it_is_never_too_early_nor_without_a_departure(times_ms, expected_ms, searched_ms, limits):
    watch = DriftDetector(expected_ms, searched_ms, limits)
    found = first_drift(watch, times_ms)
    if found is None:
        return
    number, drift = found
    assert number >= limits.rest_steps
    assert number >= limits.window * limits.patience
    assert searched_ms <= limits.max_share * sum(times_ms[:number]) * (1 + 1e-9)
    up, down = drift.found_ms > drift.expected_ms * limits.factor, drift.found_ms * limits.factor < drift.expected_ms
    assert up != down


@pytest.mark.parametrize(
    "wrong",
    [{"factor": 1.0}, {"factor": float("nan")}, {"window": 0}, {"patience": 0}, {"rest_steps": 0}, {"max_share": 0.0},
     {"max_share": 1.5}],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused_by_name(wrong):
    refused(next(iter(wrong)), DriftLimits, **wrong)
