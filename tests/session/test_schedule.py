"""`hocket.schedule`: every call is a training step, the result is eager's, and the verdict says why."""

import re

import pytest
import torch
from torch import nn

import hocket
from hocket.autotune.admission import WATCHED_STEPS
from hocket.autotune.verification import differ
from hocket.errors import CaptureError, InputError
from support.refusals import fails, refused
from support.schedules import decide, state, twin

NUM_TRIED = 3 * (WATCHED_STEPS + 1)  # the whole step is watched, then each way to divide it


@pytest.mark.parametrize("planner", ["auto", "serial", "list"])
def test_every_call_is_a_training_step_and_none_is_lost(planner: str) -> None:
    eager, planned = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, planner=planner, guard=False)
    rates = [torch.optim.lr_scheduler.StepLR(job.optimizers[0], 3, 0.9) for job in (eager, planned)]
    for number in range(45):
        first, second = eager.step(eager.batch(number)), fast(planned.batch(number))
        assert first.item() == pytest.approx(second.item(), rel=1e-3)
        for rate in rates:
            rate.step()
    assert fast.decided
    assert fast.verdict == "planned"
    assert differ(state(eager), state(planned)).relative < 1e-2


def test_the_guard_decides_by_measurement_and_says_so() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer)
    assert fast.verdict == "eager"
    assert fast.why == "not decided yet"
    assert decide(fast, job) > 10
    assert fast.verdict in ("planned", "eager")
    assert "of eager's time" in fast.why
    decision = fast.decision
    clearly_faster = decision.low is not None and decision.low > 1
    assert (fast.verdict == "planned") == clearly_faster
    assert fast.comparison().speedup == decision.speedup


def test_what_cannot_be_captured_stays_eager_with_a_reason() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss = loss * (1 + int(loss > 1e9))
        loss.backward()
        optimizer.step()
        return loss

    fast = hocket.schedule(step, model, optimizer)
    for _ in range(NUM_TRIED):
        before = model.weight.detach().clone()
        fast(torch.randn(8, 4))
        assert not torch.equal(before, model.weight)
        assert fast.verdict == "eager"
    assert fast.decided
    assert re.search(r"could not be captured: .*test_schedule\.py:\d+ .*data-dependent", fast.why)
    with pytest.raises(InputError, match="there is no plan"):
        _ = fast.plan
    strict = hocket.schedule(step, model, optimizer, strict=True)
    weights = [model.weight.detach().clone()]

    def train() -> None:
        for _ in range(NUM_TRIED):
            try:
                strict(torch.randn(8, 4))
            finally:
                weights.append(model.weight.detach().clone())

    fails(CaptureError, r"test_schedule\.py:\d+ .*data-dependent", train)
    assert not torch.equal(weights[-2], weights[-1]), "it was made, since it was recorded while it ran"


def test_report_writes_page_and_trace(tmp_path) -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial")
    assert fast.why in fast._repr_html_()
    decide(fast, job)
    fast(job.batch(0))
    assert f"{fast.comparison().eager_ms.median:,.3f}" in fast._repr_html_()
    files = fast.report(tmp_path / "report")
    assert (tmp_path / "report" / "index.html").exists()
    assert {"trace.json", "plan.txt", "graph.json"} <= set(files)
    assert fast.timeline().makespan_us > 0


def test_bad_arguments_are_named() -> None:
    _, job = twin()
    refused("unknown planner 'fastest'", hocket.schedule, job.step, job.model, job.optimizer, planner="fastest")
    with pytest.raises(InputError, match="expected a step to call"):
        hocket.schedule(None, job.model, job.optimizer)  # type: ignore[arg-type]
    refused("optimizer: expected", hocket.schedule, job.step, job.model, job.model)
    with pytest.raises(InputError, match=r"machine: expected one such as hocket\.Machine\.of\(cores=1\), got 2"):
        hocket.schedule(job.step, job.model, job.optimizer, machine=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on_progress: expected a function, got 3"):
        hocket.schedule(job.step, job.model, job.optimizer, on_progress=3)  # type: ignore[arg-type]


def test_a_schedule_is_a_context_and_says_what_it_is():
    _, job = twin()
    with hocket.schedule(job.step, job.model, job.optimizer, planner="serial") as fast:
        assert "not decided yet" in repr(fast)
        decide(fast, job)
        assert str(fast.verdict) in repr(fast)
        assert fast.decision.kind == fast.verdict
        assert fast.decision.low <= fast.decision.speedup <= fast.decision.high
    fast(job.batch(0))  # closed lanes begin anew


def test_parameters_for_a_model_are_refused_with_a_hint():
    _, job = twin()
    with pytest.raises(InputError, match=r"expected a torch.nn.Module, got generator; give the model itself"):
        hocket.schedule(job.step, job.model.parameters(), job.optimizer)


def test_progress_is_told_stage_by_stage_and_a_callback_may_raise(caplog):
    _, job = twin()
    told: list[tuple[str, int]] = []
    fast = hocket.schedule(
        job.step, job.model, job.optimizer, planner="serial", on_progress=lambda *news: told.append(news)
    )
    calls = decide(fast, job)
    assert len(told) == calls
    assert [number for _, number in told[1:]] == list(range(1, calls)), "counted anew where there is a new variant"
    assert list(dict.fromkeys(stage for stage, _ in told)) == ["watch", "capture", "verify", "profile", "compare"]

    def fail(stage, number):
        raise ValueError(f"no more after {number}")

    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial", on_progress=fail)
    decide(fast, job)
    assert caplog.text.count("on_progress raised ValueError: no more after 1") == 1
    assert caplog.text.count("it is not called again") == 1, "by no other variant"
