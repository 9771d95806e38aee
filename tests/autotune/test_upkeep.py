"""Looks at a verdict after it: they notice one that is not kept any more, and take little time."""

import pytest

from hocket.adaptation import DriftLimits
from hocket.autotune import upkeep
from hocket.autotune.candidate import TimedStep
from hocket.autotune.decision import Decision
from hocket.autotune.tuner import Tuner
from support.clocks import AFTER_A_LOOK, steps_until
from support.schedules import call

# Times of a planned step and of an eager one: at the verdict, later, and what is found then.
TURNS = [
    ((2.0, 3.0), (3.0, 2.5), "eager"),  # another program came: planned steps are slower than eager
    ((2.0, 3.0), (2.0, 1.5), "eager"),  # it left: planned steps take what they took
    ((2.0, 6.0), (2.0, 3.0), "planned"),  # faster than eager, but not as promised
    ((2.5, 2.0), (2.0, 2.8), "planned"),
]


@pytest.mark.parametrize(("before_ms", "after_ms", "expected"), TURNS)
def test_a_verdict_that_is_not_kept_any_more_is_noticed(before_ms, after_ms, expected, monkeypatch, decided):
    monkeypatch.setattr(upkeep, "LOOK_STEPS", 500)  # this clock ticks between steps, too, which looks pay for
    clock, job, fast = decided(*before_ms, drift=DriftLimits())
    first = fast.decision
    call(fast, job, AFTER_A_LOOK)
    assert fast.decision is first, "the first look found what was promised"
    clock.planned_ms, clock.eager_ms = after_ms
    for number in range(200):
        fast(job.batch(number))
        assert fast.decided
    assert len(fast.history) == 2
    assert fast.verdict == expected
    assert fast.decision.speedup == pytest.approx(after_ms[1] / after_ms[0])
    ratio = after_ms[0] / after_ms[1]
    assert f"measured again because the plan took {ratio:.2f}x of eager's time 50 steps after the verdict" in fast.why


def test_changed_step_times_bring_on_a_look_that_is_not_due_yet(monkeypatch, decided):
    monkeypatch.setattr(upkeep, "LOOK_STEPS", 500)  # this clock ticks between steps, too, which looks pay for
    clock, job, fast = decided(drift=DriftLimits())
    for number in range(110):  # the last look was at step 100, the next one is due at 200
        fast(job.batch(number))
    clock.planned_ms, clock.eager_ms = 4.0, 3.0
    call(fast, job, 90)
    assert fast.history == ("planned", "eager")


def test_looks_take_less_than_a_percent_of_a_long_training(decided):
    clock, job, fast = decided(eager_ms=8.0, drift=DriftLimits())
    num_eager, num_steps = clock.num_eager, 6000
    call(fast, job, num_steps)
    assert fast.history == ("planned",)
    lost_ms = (clock.num_eager - num_eager) * (clock.eager_ms - clock.planned_ms)
    assert 0 < lost_ms < 0.01 * num_steps * clock.planned_ms


def test_eager_that_was_decided_at_once_is_not_looked_at(monkeypatch, decided):
    """A search because of drift finds that nothing can be faster, so that there is no plan to look at."""
    monkeypatch.setattr(upkeep, "LOOK_STEPS", 500)  # this clock ticks between steps, too, which looks pay for
    clock, job, fast = decided()
    at_once = Decision("eager", "ops that wait for each other take 99%", eager_ms=(4.0,))

    def searched(self, drift):
        yield TimedStep()
        return at_once

    monkeypatch.setattr(Tuner, "search_again", searched)
    call(fast, job, AFTER_A_LOOK)
    clock.planned_ms, clock.eager_ms = 4.0, 6.0
    steps_until(fast, job, False)
    steps_until(fast, job, True)
    clock.planned_ms = clock.eager_ms = 4.0
    call(fast, job, 300)
    assert fast.decision is at_once
    assert fast.history == ("planned", "eager")
