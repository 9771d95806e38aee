"""A verdict and what follows it: pairs that interfered are kept apart, and a step that has drifted is tried again."""

import logging
import threading
import time

import pytest
import torch

import hocket
from execution.probe import KINDS, forget, meanwhile, meanwhile_in_eager, probing_job
from hocket import zoo
from hocket.adaptation import DriftLimits
from hocket.autotune.audit import Auditor
from hocket.autotune.runner import RefusedError
from hocket.autotune.verification import differ
from hocket.execution.base import synchronisation
from quick import some
from support.clocks import AFTER_A_LOOK, LIMITS, Clock, looking, scheduled, steps_until
from support.schedules import MANY, call, decide, state


@pytest.fixture(autouse=True)
def _nothing_meanwhile():
    yield
    forget()


class Quarrel:
    """Looks that take some milliseconds each; the first two that ever meet are slow whenever they meet again."""

    def __init__(self) -> None:
        self.pair: frozenset[int] = frozenset()
        self._guard = threading.Lock()
        self._running: set[int] = set()
        self._met: set[int] = set()

    def __call__(self, number: int) -> None:
        with self._guard:
            if self._running and not self.pair:
                self.pair = frozenset((number, min(self._running)))
            if number in self.pair and self._running & self.pair:
                self._met |= self.pair
            self._running.add(number)
        time.sleep(0.01)
        with self._guard:
            slow = number in self._met
        if slow:
            time.sleep(0.06)
        with self._guard:
            self._running.discard(number)
            self._met.discard(number)


@pytest.mark.parametrize("kind", some(KINDS))
def test_a_pair_that_interferes_is_kept_apart_by_the_plan_that_is_tried_next(kind, caplog):
    torch.manual_seed(0)
    job = probing_job(3)
    quarrel = Quarrel()
    meanwhile.append(quarrel)
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="concurrency", executor=kind)
    with caplog.at_level(logging.INFO, "hocket"):
        for _ in range(MANY):
            fast(job.batch(0))
            if fast.decided:
                break
    assert fast.decided
    names = {op.name for op in fast.graph.ops if "look" in op.name}
    bad = [pair for pair in fast.co_runs if pair.interfered and set(pair.ops) < names]
    assert bad
    assert fast.co_runs[0] == bad[0], "whoever lost most comes first"
    assert "of ops kept apart that interfered" in fast.why
    assert any("of ops interfered: a plan that keeps them apart is tried" in each.message for each in caplog.records)
    first, second = bad[0].ops
    sync = synchronisation(fast.graph, fast.plan)
    assert sync.before(first, second) or sync.before(second, first)
    if len(bad) == 1:  # on a machine that stood still meanwhile another pair may have looked slow, too
        third = next(iter(names - set(bad[0].ops)))
        together = [op for op in bad[0].ops if not (sync.before(op, third) or sync.before(third, op))]
        assert together, "who did not interfere stays together"
    assert any(note.startswith(f"interfered: {first} and {second}") for note in fast.notes)
    fast.close()


@pytest.mark.parametrize("planner", ["serial", "list"])
def test_a_planner_that_was_asked_for_by_name_is_not_replaced(planner):
    torch.manual_seed(0)
    job = probing_job(2)
    meanwhile.append(Quarrel())
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner=planner)
    decide(fast, job)
    assert fast.plan.planner == planner
    assert any(pair.interfered for pair in fast.co_runs) == (planner == "list")
    assert "kept apart" not in fast.why
    fast.close()


def test_a_steady_step_keeps_its_verdict(decided):
    _, job, fast = decided()
    for number in range(300):
        fast(job.batch(number))
        assert fast.decided
    assert fast.history == (fast.verdict,) == ("planned",)


@pytest.mark.parametrize("times_ms", [(4.0, 6.0), (0.5, 1.0)])
def test_when_the_step_time_drifts_the_step_is_tried_again_but_not_captured_again(times_ms, caplog, decided):
    clock, job, fast = decided()
    assert fast.verdict == "planned"
    captured = fast.captured
    call(fast, job, AFTER_A_LOOK)
    clock.planned_ms, clock.eager_ms = times_ms
    with caplog.at_level(logging.INFO, "hocket"):
        steps_until(fast, job, False)
        assert fast.verdict == "planned", "the old verdict stands for as long as there is no new one"
        searched = steps_until(fast, job, True)
    assert searched < 40
    assert fast.history == ("planned", "planned")
    drift = f"step time went from 2 ms to {times_ms[0]:.3g} ms"
    assert f"measured again because the {drift}" in fast.why
    assert any(drift in record.message for record in caplog.records)
    assert fast.captured is captured
    assert fast.notes[0].startswith("before that: planned, because plan 'serial'")


def test_eager_steps_are_watched_too(decided):
    clock, job, fast = decided(3.0, 2.5)
    assert fast.verdict == "eager"
    clock.planned_ms, clock.eager_ms = 7.0, 6.0
    steps_until(fast, job, False)
    steps_until(fast, job, True)
    assert fast.history == ("eager", "eager")
    assert "step time went from 2.5 ms to 6 ms" in fast.why


def test_every_step_trains_whatever_is_measured_again():
    clock = Clock()
    job, fast = scheduled(clock)
    torch.manual_seed(0)
    eager = zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam")
    for number in range(500):
        clock.planned_ms, clock.eager_ms = (2.0, 3.0) if number // 100 % 2 else (6.0, 5.0)
        fast(job.batch(number))
        eager.step(eager.batch(number))
    assert len(fast.history) > 2
    # Profiling runs at one thread, too; this model is too small for torch to split its sums.
    assert differ(state(eager), state(job)).bitwise
    fast.close()


def test_it_is_never_tried_again_too_soon_however_wild_the_times(decided):
    clock, job, fast = decided()
    turns = []
    for number in range(1000):
        clock.planned_ms, clock.eager_ms = (2.0, 3.0) if number // 40 % 2 else (9.0, 8.0)
        before = fast.decided
        fast(job.batch(number))
        if before != fast.decided:
            turns.append(number)
    begins, ends = turns[::2], turns[1::2]
    assert len(begins) > 2
    assert all(begin - end >= LIMITS.rest_steps for end, begin in zip(ends, begins[1:], strict=False))
    assert all(end - begin < 60 for begin, end in zip(begins, ends, strict=False))


def test_the_share_of_time_that_is_spent_on_trying_again_is_bounded(decided):
    limits = DriftLimits(factor=1.3, window=5, patience=2, rest_steps=1, max_share=0.1)
    clock, job, fast = decided(drift=limits)
    spent_ms = {True: 0.0, False: 0.0}
    for number in range(1500):
        clock.planned_ms, clock.eager_ms = (2.0, 3.0) if number // 20 % 2 else (9.0, 8.0)
        decided, start_s = fast.decided, clock.now_s
        fast(job.batch(number))
        spent_ms[decided] += (clock.now_s - start_s) * 1e3
    assert len(fast.history) > 2
    # The clock itself ticks between the two that time a step: twice its time.
    assert spent_ms[False] <= 0.25 * spent_ms[True]


def test_an_error_while_trying_again_leaves_the_old_verdict_and_the_capture(decided):
    clock, job, fast = decided()
    captured = fast.captured
    clock.planned_ms, clock.eager_ms = 4.0, 6.0
    steps_until(fast, job, False)
    inputs, targets = job.batch(0)
    wrong = targets.clone()
    wrong[0] = 10_000
    with pytest.raises(IndexError):
        fast((inputs, wrong))
    assert fast.decided
    assert fast.history == ("planned",)
    assert torch.isfinite(fast((inputs, targets)))
    steps_until(fast, job, False)
    steps_until(fast, job, True)
    assert fast.history == ("planned", "planned")
    assert fast.captured is captured


def test_without_the_guard_a_plan_stays_whatever_it_costs(decided):
    clock, job, fast = decided(guard=False)
    clock.planned_ms = 50.0
    for number in range(300):
        fast(job.batch(number))
        assert fast.decided
    assert fast.history == ("planned",)


def test_while_eager_has_its_turn_nobody_elses_lanes_are_there():
    """Their threads would slow down eager's, and the plan would look better than it is."""
    torch.manual_seed(0)
    job = zoo.load("mlp", depth=2, width=16, batch_size=4)
    beside: list[int] = []

    def lanes() -> int:
        return sum(thread.name.startswith("hocket-") for thread in threading.enumerate())

    def look_beside(number: int) -> None:
        until = time.monotonic() + 2.0
        while lanes() and time.monotonic() < until:
            time.sleep(0.001)  # a thread that was told to end needs a moment
        beside.append(lanes())

    meanwhile_in_eager.append(look_beside)
    fast = hocket.schedule(looking(job.step), job.model, job.optimizer, executor="python")
    calls = decide(fast, job)
    several = [candidate for candidate in fast._pool.current.decision.candidates if len(candidate.plan.lanes) > 1]
    assert several, "there was somebody who had threads"
    assert len(fast._pool.current.decision.eager_ms) < len(beside) < calls
    assert set(beside) == {0}
    fast.close()


def test_a_step_that_an_audit_refused_stays_eager_for_that_reason(monkeypatch, decided):
    """Its steps take another time than planned ones did, which is no reason to look or to search again."""
    clock, job, fast = decided()
    wrong = RefusedError("planned step 1 does not compute what eager computes")
    monkeypatch.setattr(Auditor, "step", lambda self, best, batch, eager: (eager(batch), wrong))
    clock.eager_ms = 9.0
    call(fast, job, 300)
    assert fast.history == ("planned", "eager")
    assert fast.why == str(wrong)
