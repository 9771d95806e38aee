"""Lanes as the plan says: widths, cores, errors, one step at a time; for Python threads and for native lanes."""

import gc
import itertools
import os
import signal
import threading
import time

import pytest
import torch

from equivalence.compare import assert_same, everything, serial, twins
from execution.probe import KINDS, captured_job, forget, looks, meanwhile, probed, probing_job, spread
from hocket.errors import ExecutionError, PlanError
from hocket.execution import executor
from hocket.execution.threads import ThreadLanes
from hocket.ir import Device, Lane, Machine, Plan
from hocket.tracing import capture
from support.refusals import fails

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _nothing_meanwhile():
    yield
    forget()


def lanes(*widths: int) -> list[Lane]:
    return [Lane(f"lane{number}", width=width) for number, width in enumerate(widths)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 2, 3), (2, 1), (3,), (1,)])
def test_ops_find_themselves_on_a_thread_as_wide_as_their_lane(kind, widths, started):
    before = torch.get_num_threads()
    job, captured = probed()
    planned = started(captured, spread(captured, *lanes(*widths)), kind=kind)
    for _ in range(2):
        looks.clear()
        planned(job.batch(0))
        seen = {look.number: look for look in looks}
        assert [seen[number].width for number in range(3)] == [(widths * 3)[number] for number in range(3)]
        assert len({look.thread for look in looks}) == len(widths), "each lane is one thread"
        assert torch.get_num_threads() == before, "the caller keeps its own width"


@pytest.mark.parametrize("kind", KINDS)
def test_the_width_that_the_caller_has_when_it_calls_is_left_alone(kind, started):
    before = torch.get_num_threads()
    job, captured = probed()
    planned = started(captured, spread(captured, *lanes(1, 1)), kind=kind)
    try:
        torch.set_num_threads(3)
        planned(job.batch(0))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    planned(job.batch(0))
    assert torch.get_num_threads() == before


def test_one_lane_as_wide_as_the_caller_runs_on_the_callers_own_thread(started):
    before = torch.get_num_threads()
    job, captured = probed()
    planned = started(captured, serial(captured), kind="python")
    planned(job.batch(0))
    assert {look.thread for look in looks} == {threading.get_native_id()}
    try:
        # Asked for by a caller of another width, the lane still has its own.
        torch.set_num_threads(before + 1)
        looks.clear()
        planned(job.batch(0))
        assert {look.width for look in looks} == {before}
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_has_the_same_cores_in_every_step_and_lanes_are_pinned_once(kind, started):
    machine = Machine((Device("cpu0", cores=2, cpus=((CPUS[0],), (CPUS[1],))),))
    job, captured = probed(4)
    # As wide as no caller is, so that no lane gets the caller's own thread.
    width = torch.get_num_threads() + 1
    pinned = [Lane("first", width=width, cores=(1,)), Lane("second", width=width, cores=(0,))]
    planned = started(captured, spread(captured, *pinned), machine, kind=kind)
    for _ in range(5):
        planned(job.batch(0))
    assert os.sched_getaffinity(0) == set(CPUS)
    seen = {(look.number, look.thread, look.cpus) for look in looks}
    assert {number: cpus for number, _, cpus in seen} == {number: {CPUS[1 - number % 2]} for number in range(4)}
    assert len(seen) == 4, "each op on one thread, with one set of cores"
    for _, thread, _ in seen:
        os.sched_setaffinity(thread, CPUS)  # another program does this, and no launch or step undoes it
    looks.clear()
    planned(job.batch(0))
    assert {look.cpus for look in looks} == {frozenset(CPUS)}


@pytest.mark.parametrize("kind", KINDS)
def test_cores_that_the_process_may_not_use_are_refused_by_name(kind):
    machine = Machine((Device("cpu0", cores=2, cpus=((CPUS[0],), (9999,))),))
    _, captured = probed(2)
    plan = spread(captured, Lane("here"), Lane("there", cores=(1,)))
    fails(ExecutionError, r"'there' is pinned to CPUs 9999", executor, captured, plan, machine, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_no_lane_for_threads(kind):
    _, captured = probed(1)
    with pytest.raises(ExecutionError, match="'gpu' is a stream"):
        executor(captured, Plan((Lane("gpu", captured.graph.order, "stream"),)), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(1,), (1, 1), None])
def test_an_error_names_op_and_layer_and_the_next_step_works(kind, widths, started):
    pair = twins(probing_job)
    captured = captured_job(pair.planned)
    pair.eager.step(pair.eager.batch(0))
    plan = spread(captured, *lanes(*widths)) if widths else serial(captured)
    planned = started(captured, plan, kind=kind)
    for _ in range(3):
        with pytest.raises(IndexError, match="out of range") as caught:
            planned((torch.tensor([0, 2, 7, 1]),))
        assert caught.value.__notes__ == ["in op 'words/embedding' of layer 'words' of the planned step"]
        pair.eager.step(pair.eager.batch(1))
        planned(pair.planned.batch(1))
        assert_same(everything(pair.eager), everything(pair.planned))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_whichever_lane_an_op_fails_on_the_others_stop_waiting_for_it(kind, number, started):
    """Three lanes; the first one waits for what the others find, and no lane may wait for ever."""
    job, captured = probed(3)
    planned = started(captured, spread(captured, *lanes(1, 1, 1)), kind=kind)

    def fail(at):
        if at == number:
            raise ValueError(f"look {at} sees nothing")

    for _ in range(3):
        meanwhile.append(fail)
        with pytest.raises(ValueError, match=f"look {number} sees nothing") as caught:
            planned(job.batch(0))
        name = [op for op in captured.graph.order if "look" in op][number]
        assert caught.value.__notes__ == [f"in op {name!r} of layer '' of the planned step"]
        meanwhile.clear()
        assert torch.isfinite(planned(job.batch(0)))


@pytest.fixture
def interruptible():
    """A process that a shell started in the background ignores SIGINT, and Python with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_step_and_the_next_one_works(started):
    job, captured = probed()
    planned = started(captured, spread(captured, *lanes(1, 1)), kind="python")
    main = threading.main_thread().ident

    def interrupt(number):
        if number == 1:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)

    meanwhile.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        planned(job.batch(0))
    meanwhile.clear()
    assert torch.isfinite(planned(job.batch(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_cannot_run_one_plan_at_once(kind, started):
    job, captured = probed()
    planned = started(captured, spread(captured, *lanes(1, 1)), kind=kind)
    inside, go_on, results = threading.Event(), threading.Event(), []

    def wait(number):
        inside.set()
        assert go_on.wait(30)

    meanwhile.append(wait)
    other = threading.Thread(target=lambda: results.append(planned(job.batch(0))))
    other.start()
    try:
        assert inside.wait(30)
        fails(ExecutionError, "already running in another thread", planned, job.batch(0))
    finally:
        go_on.set()
        other.join(30)
    assert len(results) == 1
    meanwhile.clear()
    planned(job.batch(0))
    assert all(p.grad is not None for p in job.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_really_run_at_once(kind, started):
    """Each look waits for the other: on one lane, or one lane after the other, they would wait for ever."""
    job, captured = probed(2)
    planned = started(captured, spread(captured, *lanes(1, 1)), kind=kind)
    meeting = threading.Barrier(2, timeout=30)
    meanwhile.append(lambda number: meeting.wait())
    planned(job.batch(0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeline_tells_of_the_last_step_and_its_spans_do_not_overlap(kind, started):
    job, captured = probed()
    plan = spread(captured, *lanes(1, 1), Lane("idle"))
    plan = Plan((*plan.lanes[:2], Lane("idle")), {}) if not plan.lanes[2].ops else plan
    planned = started(captured, plan, kind=kind)
    fails(ExecutionError, "no step has run", planned.timeline)
    planned(job.batch(0))
    first = planned.timeline()
    planned(job.batch(1))
    timeline = planned.timeline()
    assert timeline != first
    assert timeline.source == "measured"
    assert timeline.lanes == tuple(lane.name for lane in plan.lanes)
    for lane in plan.lanes:
        spans = timeline.by_lane[lane.name]
        assert tuple(span.op for span in spans) == lane.ops
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_would_wait_for_ever_is_refused_with_the_ops_name(kind):
    _, captured = probed()
    order = captured.graph.order
    with pytest.raises(PlanError) as caught:
        executor(captured, Plan((Lane("main", order[::-1]),)), kind=kind)
    assert caught.value.op in order
    assert repr(caught.value.op) in str(caught.value)
    crossed = Plan((Lane("x", order[1:]), Lane("y", order[:1])), {order[0]: (order[-1],)})
    fails(PlanError, "deadlock", executor, captured, crossed, kind=kind)
    fails(PlanError, "is run by no lane", executor, captured, Plan((Lane("main", order[1:]),)), kind=kind)


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hocket-")}


def test_threads_end_when_lanes_are_closed_or_forgotten():
    job, captured = probed()
    before = lane_threads()
    for forgets in (False, True):
        planned = ThreadLanes(captured, spread(captured, *lanes(1, 1)))
        assert lane_threads() <= before, "no threads before the first step"
        planned(job.batch(0))
        mine = lane_threads() - before
        assert sorted(thread.name for thread in mine) == ["hocket-lane0", "hocket-lane1"]
        if not forgets:
            planned.close()
            planned.close()
        del planned
        gc.collect()
        for thread in mine:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_lanes_start_anew_when_they_are_called(kind):
    pair = twins(probing_job)
    captured = captured_job(pair.planned)
    pair.eager.step(pair.eager.batch(0))
    planned = executor(captured, spread(captured, *lanes(1, 1)), kind=kind)
    for number in range(3):
        pair.eager.step(pair.eager.batch(number))
        planned(pair.planned.batch(number))
        measured = planned.timeline()
        planned.close()
        assert planned.timeline() == measured, "what the last step took is still there"
        assert_same(everything(pair.eager), everything(pair.planned))


def test_ops_run_without_recording_whatever_the_caller_does(started):
    job, captured = probed()
    planned = started(captured, spread(captured, *lanes(1, 1)), kind="python")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            result = planned(job.batch(0))
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)
        assert result.requires_grad, "as what eager returns, whose graph its own backward has used up"
    assert not any(look.grad_mode for look in looks)
    assert all(p.requires_grad and p.is_leaf for p in job.model.parameters())


def test_a_warning_of_an_op_on_any_lane_is_pythons(capfd, started):
    def step(x):
        return x[:1].std(0), x[:2].std(0)

    with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        captured = capture(step, None, None, torch.ones(2, 3))
    first = next(name for name in captured.graph.order if "std" in name)
    rest = [name for name in captured.graph.order if name != first]
    planned = started(captured, Plan((Lane("lane0", tuple(rest)), Lane("lane1", (first,)))), kind="native")
    with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        planned(torch.ones(2, 3))
    with pytest.raises(UserWarning, match="degrees of freedom is <= 0") as caught:  # an error in all tests
        planned(torch.ones(2, 3))
    assert caught.value.__notes__ == [f"in op {first!r} of layer '' of the planned step"]
    assert capfd.readouterr().err == ""
