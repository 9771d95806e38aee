"""A step that raises, or whose loss is no number, before the verdict and after it."""

from __future__ import annotations

import math

import pytest
import torch

import hocket
from execution.probe import KINDS, probing_job
from hocket.autotune.verification import differ
from quick import covering
from support.schedules import decide, pass_audits, state, twin


def test_an_error_in_the_step_reaches_the_caller_and_the_schedule_survives() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial", guard=False)
    inputs, targets = job.batch(0)
    decide(fast, job)
    fast(job.batch(0))
    pass_audits(fast, job)
    wrong = targets.clone()
    wrong[0] = 10_000
    with pytest.raises(IndexError) as caught:
        fast((inputs, wrong))
    assert any("nll_loss_forward" in note for note in caught.value.__notes__)
    captured = fast.captured
    for _ in range(3):
        assert torch.isfinite(fast((inputs, targets)))
        assert fast.decided, "one step without gradients is no reason to begin anew"
    assert fast.captured is captured


@pytest.mark.parametrize(("first", "kind"), covering([0, 1, 4, 20], KINDS))
def test_a_loss_that_is_no_number_is_no_number_by_plan_too(kind: str, first: int) -> None:
    eager, planned = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, planner="serial", guard=False, executor=kind)
    for number in range(25):
        inputs, targets = eager.batch(number)
        if number >= first:
            inputs = torch.full_like(inputs, math.nan)
        one, other = eager.step((inputs, targets)), fast((inputs, targets))
        assert one.isnan() == other.isnan() == (number >= first)
    assert fast.verdict == "planned", fast.why
    found = differ(state(eager), state(planned))
    assert found.equal, found
    fast.close()


@pytest.mark.parametrize(("calls", "kind"), covering([1, 3, 50], KINDS))
def test_an_op_that_raises_is_named_with_its_layer_wherever_the_step_is_in_its_life(kind: str, calls: int) -> None:
    torch.manual_seed(0)
    job = probing_job(2)
    options = {"planner": "list", "guard": False, "executor": kind}
    fast = hocket.schedule(job.step, job.model, job.optimizer, **options)
    for _ in range(calls):
        fast(job.batch(0))
    assert fast.decided == (calls == 50)
    for _ in range(2):
        pass_audits(fast, job)
        with pytest.raises(IndexError, match="out of range") as caught:
            fast((torch.tensor([0, 2, 7, 1]),))
        notes = getattr(caught.value, "__notes__", [])
        if calls == 3:  # in the midst of profiling: it begins anew, and the second time is an eager step
            assert fast.decided is False
        elif calls == 50:
            assert notes == ["in op 'words/embedding' of layer 'words' of the planned step"]
        fast(job.batch(1))
    for _ in range(50):
        assert torch.isfinite(fast(job.batch(0)))
    assert fast.verdict == "planned"
    fast.close()
