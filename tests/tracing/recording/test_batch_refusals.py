"""A branch on more than the batch is refused, also where the step swallows the refusal."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same, copied, twins
from equivalence.test_steps import mlp
from hocket.errors import CaptureError
from hocket.tracing import capture
from support.refusals import fails
from tracing.recording.batch_steps import batch_of, job_of, loss_of, mask


def with_buffer() -> nn.Module:
    model = mlp()
    model.register_buffer("limit", torch.tensor(1.0))
    return model


def on_a_tensor_written_from_the_model(model, batch):
    scratch = torch.zeros(4, 3)
    view = scratch[1:]
    scratch.add_(model(batch["inputs"]).detach())
    return view.sum() > 0


def on_a_batch_that_the_step_writes(model, batch):
    batch["mask"].add_(1)
    return batch["mask"].min() > 1


OPTIMIZERS: list[torch.optim.Optimizer] = []
# What the step branches on.
IMPURE = {
    "a buffer": lambda model, batch: (batch["mask"] < model.limit).any(),
    "a parameter": lambda model, batch: model[0].weight.sum() > 0,
    "randomness": lambda model, batch: torch.rand(()) < batch["mask"].min(),
    "what dropout leaves": lambda model, batch: nn.functional.dropout(batch["inputs"]).sum() > 0,
    "a tensor written from the model": on_a_tensor_written_from_the_model,
    "a batch that the step writes": on_a_batch_that_the_step_writes,
    "a number of the optimizer": lambda model, batch: (
        (batch["inputs"] * OPTIMIZERS[-1].param_groups[0]["lr"]).sum() > 0
    ),
}


@pytest.mark.parametrize("asked", IMPURE)
def test_a_branch_on_anything_else_is_refused(asked):
    def body(model, batch):
        return loss_of(model, batch) * (2 if IMPURE[asked](model, batch) else 3)

    job = job_of(body, [batch_of(0, mask=mask(hole=False))], with_buffer())
    OPTIMIZERS.append(job.optimizer)
    job.step(job.batch(0))
    before = copied(job)
    with pytest.raises(CaptureError, match=r"test_batch_refusals\.py:\d+ .*reads a tensor's value"):
        capture(job.step, job.model, job.optimizer, job.batch(0))
    assert_same(before, copied(job))


def test_a_batch_that_shares_memory_with_a_parameter_is_no_batch():
    model = mlp()
    batch = batch_of(0, mask=model[0].weight.detach()[:2])
    job = job_of(lambda model, batch: loss_of(model, batch) * (2 if batch["mask"].sum() > 0 else 3), [batch], model)
    job.step(batch)
    fails(CaptureError, "reads a tensor's value", capture, job.step, job.model, job.optimizer, batch)


# --- Refusals that the step swallows ---


def swallowed_float(model, batch):
    loss = loss_of(model, batch)
    try:
        value = float(loss)
    except Exception:  # noqa: BLE001
        value = 0.0
    return loss * (1 + value)


def swallowed_late(model, batch):
    loss = loss_of(model, batch)
    value = loss.item()
    try:
        sys.stdout.write(f"{value:.2f}")
    except Exception:  # noqa: BLE001
        return loss * 2
    return loss


def swallowed_everything(model, batch):
    loss = loss_of(model, batch)
    try:
        if loss > 1:
            return loss * 2
    except BaseException:  # noqa: BLE001
        pass
    return loss


@pytest.mark.parametrize("body", [swallowed_float, swallowed_late, swallowed_everything])
def test_a_refusal_that_the_step_swallows_is_raised_all_the_same(body):
    pair = twins(lambda: job_of(body, [batch_of(0)]))
    pair.planned.step(pair.planned.batch(0))
    before = copied(pair.planned)
    with pytest.raises(CaptureError, match=r"test_batch_refusals\.py:\d+"):
        capture(pair.planned.step, pair.planned.model, pair.planned.optimizer, pair.planned.batch(0))
    assert_same(before, copied(pair.planned))
