"""Several schedules in one thread and in two, and one that is called while it runs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hocket
from execution.probe import KINDS, meanwhile, probing_job
from hocket.autotune.verification import differ
from hocket.errors import ExecutionError
from quick import covering
from support.refusals import fails
from support.schedules import decide, state, twin


def two_schedules(kind: str) -> tuple[list[Any], list[Any]]:
    """Pairs of an eager job and its twin, and the schedules of the twins."""
    pairs = [twin() for _ in range(2)]
    return pairs, [
        hocket.schedule(p.step, p.model, p.optimizer, planner=planner, guard=False, executor=kind)
        for (_, p), planner in zip(pairs, ("serial", "list"), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_two_schedules_take_turns_in_one_thread(kind: str) -> None:
    pairs, fasts = two_schedules(kind)
    for number in range(30):
        for (eager, planned), fast in zip(pairs, fasts, strict=True):
            assert fast(planned.batch(number)).item() == pytest.approx(eager.step(eager.batch(number)).item(), rel=1e-3)
    for (eager, planned), fast in zip(pairs, fasts, strict=True):
        assert fast.verdict == "planned"
        assert differ(state(eager), state(planned)).relative < 1e-3
        fast.close()


def at_once(*works: Callable[[], None]) -> None:
    """Each in a thread of its own, all begun together; whatever one of them raises is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works), timeout=30)

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it hangs"
    for error in errors:
        raise error


@pytest.mark.parametrize("kind", KINDS)
def test_two_schedules_run_at_once_in_two_threads(kind: str) -> None:
    pairs, fasts = two_schedules(kind)

    def train(number: int) -> None:
        # A scheduler's step in one thread, while the step of another is being captured.
        rate = torch.optim.lr_scheduler.StepLR(pairs[number][1].optimizers[0], 3, 0.9)
        for each in range(30):
            fasts[number](pairs[number][1].batch(each))
            rate.step()

    at_once(lambda: train(0), lambda: train(1))
    for (eager, planned), fast in zip(pairs, fasts, strict=True):
        rate = torch.optim.lr_scheduler.StepLR(eager.optimizers[0], 3, 0.9)
        for each in range(30):
            eager.step(eager.batch(each))
            rate.step()
        assert fast.verdict == "planned", fast.why
        assert differ(state(eager), state(planned)).relative < 1e-3
        fast.close()


@pytest.mark.parametrize(("calls", "kind"), covering([0, 3, 50], KINDS))
def test_a_schedule_that_is_called_while_it_runs_says_so_and_goes_on(kind: str, calls: int) -> None:
    torch.manual_seed(0)
    job = probing_job(2)
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="list", guard=False, executor=kind)
    for _ in range(calls):
        fast(job.batch(0))
    inside, go_on = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        inside.set()
        assert go_on.wait(60)

    def second() -> None:
        try:
            assert inside.wait(60)
            fails(ExecutionError, "already running; give each thread a schedule of its own", fast, job.batch(1))
        finally:
            go_on.set()

    meanwhile.append(wait)
    at_once(lambda: fast(job.batch(0)), second)
    meanwhile.clear()
    decide(fast, job)
    assert fast.verdict == "planned"
    fast.close()


def test_a_step_that_calls_its_own_schedule_is_told_so() -> None:
    _, job = twin()

    def step(batch: object) -> torch.Tensor:
        return fast(batch)

    fast = hocket.schedule(step, job.model, job.optimizer)
    for _ in range(2):
        fails(ExecutionError, "already running", fast, job.batch(0))
