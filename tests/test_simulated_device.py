"""All of a schedule on streams, without a GPU: what is decided, shown and reported there, and what it computes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import hocket
from execution.streams.deferred import Deferred
from hocket import zoo
from hocket.adaptation import DriftLimits
from hocket.autotune.verification import differ
from hocket.backends import Backend, SimulatedBackend, SimulatedClock, StreamBackend
from hocket.errors import InputError
from hocket.ir import Device, Machine
from hocket.session import Schedule
from hocket.simulation import simulate
from support.schedules import decide, state, twin

A100 = Machine.preset("a100")
LABEL = "simulated NVIDIA A100 SXM4 40 GB"


def scheduled(job: hocket.Job, machine: Machine = A100, clock: SimulatedClock | None = None, **options) -> Schedule:
    clock = clock or SimulatedClock()
    backend: Callable[[], Backend] = partial(SimulatedBackend, machine, clock)
    return Schedule(job.step, job.model, job.optimizer, clock=clock, backend=backend, **options)


def slow_graphs() -> Machine:
    """A GPU on which an op of a graph takes longer to launch than one by itself."""
    return replace(A100, devices=(replace(A100.devices[0], graph_launch_us=30.0),))


def one_by_one_ms(fast: Schedule) -> float:
    """Duration of an eager step: one stream, each op launched by itself."""
    serial = fast.backend.serial_plan(fast.captured)
    costs = fast.backend.costs(fast.captured)
    return simulate(fast.graph, serial, costs, A100, launches="eager").makespan_us / 1e3


def test_a_planned_step_is_decided_shown_and_reported_as_one_of_the_gpu(tmp_path: Path) -> None:
    eager, planned = twin()
    fast = scheduled(planned)
    calls = decide(fast, planned)
    for number in range(calls):
        eager.step(eager.batch(number))
    for number in range(calls, calls + 10):
        assert torch.equal(eager.step(eager.batch(number)), fast(planned.batch(number)))
    assert differ(state(eager), state(planned)).bitwise, "streams and graphs compute what the user's Python computes"

    assert fast.verdict == "planned", fast.why
    assert {lane.kind for lane in fast.plan.lanes} == {"stream"}
    assert set(fast.costs.sources.values()) == {"analytic"}, "nothing was measured, and the costs say so"
    assert fast.decision.eager_ms[0] == pytest.approx(one_by_one_ms(fast))
    assert fast.candidate is not None
    assert fast.candidate.step_ms == pytest.approx(fast.candidate.predicted.makespan_us / 1e3)

    timeline = fast.timeline()
    assert timeline.by_op.keys() == set(fast.graph.order)
    assert timeline.source == "simulated"
    assert fast.bounds == hocket.bounds(fast.graph, fast.costs, A100)
    assert fast.bounds.lower_us <= timeline.makespan_us

    comparison = fast.comparison("a step")
    assert (comparison.device, comparison.cores, comparison.verdict) == (LABEL, 108, "planned")
    assert comparison.speedup == pytest.approx(fast.decision.speedup)
    assert comparison.lower_bound_ms == fast.bounds.lower_us / 1e3
    assert "simulated, not measured" in comparison.notes[0]

    paths = fast.report(tmp_path / "report")
    written = {name: path.read_text() for name, path in paths.items()}
    assert json.loads(written["comparison.json"])["device"] == LABEL
    assert LABEL in written["index.html"]
    assert "gpu0, stream, priority" in written["index.html"]
    assert json.loads(written["trace.json"])["traceEvents"]
    torch_version = torch.__version__  # may end in "+cpu"
    for name, text in written.items():
        found = text.replace(torch_version, "").replace("computed on the CPU", "").lower()
        assert "cpu" not in found, name
    fast.close()


def test_a_graph_that_is_slower_than_eager_stays_eager_and_is_reported(tmp_path: Path) -> None:
    _, job = twin()
    fast = scheduled(job, slow_graphs())
    decide(fast, job)
    assert fast.verdict == "eager"
    assert fast.decision.speedup is not None
    assert fast.decision.speedup < 0.5
    assert "of eager's time" in fast.why
    comparison = fast.comparison()
    assert comparison.outcome.startswith("eager kept: the plan is")
    assert comparison.device == LABEL
    assert "Eager kept" in fast.report(tmp_path)["index.html"].read_text()
    before_s = fast._pool.config.clock()
    fast(job.batch(0))
    assert (fast._pool.config.clock() - before_s) * 1e3 == pytest.approx(one_by_one_ms(fast)), (
        "eager steps take eager's time"
    )
    fast.close()


def test_a_step_that_has_drifted_is_searched_again() -> None:
    _, job = twin()
    clock = SimulatedClock()
    limits = DriftLimits(factor=1.3, window=5, patience=2, rest_steps=30, max_share=1.0)
    fast = scheduled(job, clock=clock, drift=limits)
    decide(fast, job)
    first = fast.comparison()
    for number in range(100):
        fast(job.batch(number))
        assert fast.decided
    clock.slowdown = 2.0
    for number in range(200):
        fast(job.batch(number))
        if not fast.decided:
            break
    assert not fast.decided, "twice the time is a drift"
    decide(fast, job)
    assert [str(verdict) for verdict in fast.history] == ["planned", "planned"]
    assert "measured again because the step time went from" in fast.why
    assert fast.notes[0].startswith("before that: planned, because plan 'critical-path'")
    assert fast.comparison().planned_ms.median == pytest.approx(2 * first.planned_ms.median)
    fast.close()


def test_each_signature_has_a_device_of_its_own() -> None:
    job = zoo.load("mlp", depth=2, width=16, batch_size=4)
    wider = zoo.load("mlp", depth=2, width=16, batch_size=4096)
    fast = scheduled(job, slow_graphs())  # stays eager: an eager step takes what its own graph says
    decide(fast, job)
    small_ms = fast.decision.expected_ms
    decide(fast, wider)
    assert fast.decision.expected_ms > small_ms
    fast(job.batch(0))
    assert fast.decision.expected_ms == small_ms
    fast.close()


def test_streams_that_run_what_they_may_in_any_order(tmp_path: Path) -> None:
    """The backend of real GPUs, measured costs included, on a device that draws what runs next."""
    eager, planned = twin()
    gpu = Machine((Device("gpu0", "cuda", 56, memory_bytes=16e9, priorities=2),), note="nowhere")
    fast = Schedule(
        *(planned.step, planned.model, planned.optimizer),
        guard=False,
        backend=lambda: StreamBackend(Deferred(3), gpu, "nowhere"),
    )
    calls = decide(fast, planned)
    for number in range(calls):
        eager.step(eager.batch(number))
    for number in range(calls, calls + 6):
        loss = fast(planned.batch(number))
        assert torch.equal(eager.step(eager.batch(number)), loss)
    assert differ(state(eager), state(planned)).bitwise
    timeline = fast.timeline()
    assert timeline.source == "measured"
    assert timeline.by_op.keys() == set(fast.graph.order)
    assert fast.bounds.lower_us <= fast.bounds.upper_us == len(fast.graph), "each op took a microsecond"
    assert set(fast.costs.sources.values()) <= {"measured"}
    page = fast.report(tmp_path)["index.html"].read_text()
    assert "gpu0, stream" in page
    assert differ(state(eager), state(planned)).bitwise, "a report changes nothing"
    assert torch.equal(eager.step(eager.batch(99)), fast(planned.batch(99)))
    fast.close()


@pytest.mark.parametrize("planner", ["auto", "critical-path", "serial"])
def test_planners_for_streams(planner: str) -> None:
    job = zoo.load("mlp", depth=2, width=16, batch_size=4)
    fast = scheduled(job, planner=planner)
    decide(fast, job)
    assert (len(fast.plan.lanes) == 1) == (planner == "serial")


def test_a_planner_for_cores_is_refused_by_name() -> None:
    _, job = twin()
    with pytest.raises(InputError, match="planner 'list' makes plans for CPU cores, and the step is on a GPU"):
        scheduled(job, planner="list")


def test_a_machine_without_a_known_gpu_cannot_be_simulated() -> None:
    nothing = Machine((Device("gpu0", "cuda", 56),))
    for machine in (Machine.of(cores=2), nothing):
        with pytest.raises(InputError, match="expected a GPU with flops_per_s and bytes_per_s to simulate"):
            SimulatedBackend(machine, SimulatedClock())
