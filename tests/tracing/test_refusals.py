"""A step that cannot become a graph is refused with the user's own line in the reason, and goes on to work."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hocket
from equivalence.compare import assert_same, copied
from equivalence.test_steps import adam, mlp, mse, pairs
from hocket.errors import CaptureError, HocketError
from hocket.job import Job
from hocket.tracing import capture
from support.refusals import line_at_fault
from support.steps import update


def job_of(body, model=None) -> Job:
    """A step whose loss is ``body(model, inputs, targets, optimizer)``."""
    model = model or mlp()
    optimizer = adam(model)

    def step(batch):
        return update(optimizer, body(model, *batch, optimizer))

    return Job(step, model, optimizer, pairs())


# In each of these the line marked "here" is at fault. Further ones: refused_steps.py.


def prints_an_item(model, inputs, targets, optimizer):
    loss = (model(inputs) - targets).square().mean()
    value = loss.item()  # here
    sys.stdout.write(f"{value}")
    return loss


def goes_to_a_list_inside_a_function_of_torch(model, inputs, targets, optimizer):
    loss = model(inputs).mean()
    handle = loss.register_hook(lambda gradient: gradient * len(loss.reshape(1).tolist()))  # here
    loss.backward(retain_graph=True)
    handle.remove()
    return loss


def goes_to_another_library(model, inputs, targets, optimizer):
    out = model(inputs)
    np.from_dlpack(out.detach())  # here
    return out.mean()


def prints_a_tensor(model, inputs, targets, optimizer):
    out = model(inputs)
    sys.stdout.write(str(out))  # here
    return out.mean()


def computes_element_by_element(model, inputs, targets, optimizer):
    out = model(inputs).detach()
    out.apply_(lambda value: value + 1)  # here
    return model(inputs).mean() + out.mean()


def makes_a_tensor_of_tensors(model, inputs, targets, optimizer):
    out = model(inputs)
    return (out.mean() * torch.tensor([out.detach().max(), 1.0])).sum()  # here


def indexes_by_what_it_computes(model, inputs, targets, optimizer):
    out = model(inputs)
    return out[out.sum(1).argmax() :].mean()  # here


def fills_with_what_it_computes(model, inputs, targets, optimizer):
    out = model(inputs)
    return (out * torch.full((4, 3), out.detach().max())).mean()  # here


def exchanges_data(model, inputs, targets, optimizer):
    model[0].bias.data = inputs.view(-1)[: len(model[0].bias)]  # here, memory of the batch
    return (model(inputs) - targets).square().mean()


def repeats(model, inputs, targets, optimizer):
    often = (model(inputs) > 0).sum(1)
    return model(inputs.repeat_interleave(often, 0)).mean()  # here


AT_FAULT = [
    *(prints_an_item, exchanges_data, repeats, goes_to_a_list_inside_a_function_of_torch, prints_a_tensor),
    *(goes_to_another_library, computes_element_by_element, makes_a_tensor_of_tensors, indexes_by_what_it_computes),
    fills_with_what_it_computes,
]


def refused(job: Job, batch=None) -> str:
    """The reason; and the step must work, and work from where it stood, after the refusal."""
    torch.manual_seed(1)
    job.step(job.batch(0))
    before = copied(job)
    with pytest.raises(CaptureError) as caught:
        capture(job.step, job.model, job.optimizer, batch or job.batch(1))
    assert_same(before, copied(job))
    assert isinstance(caught.value, HocketError)
    return str(caught.value)


@pytest.mark.parametrize("body", AT_FAULT, ids=lambda body: body.__name__)
def test_the_reason_names_the_line_at_fault(body):
    job = job_of(body)
    reason = refused(job)
    assert re.search(re.escape(line_at_fault(body)) + r"\b", reason), reason
    job.step(job.batch(1))


def in_a_library(model, inputs, targets, optimizer):
    return (model(inputs) - targets).square().mean()


def test_a_line_inside_a_torch_module_is_told_as_the_line_that_calls_the_model():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None))
    model[1].num_batches_tracked = torch.tensor(0.0)  # a whole number would be followed
    reason = refused(job_of(in_a_library, model))
    _, first = inspect.getsourcelines(in_a_library)
    assert f"test_refusals.py:{first + 1}" in reason


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 1), lr_scheduler.StepLR(o, 2)], [3]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 1), lr_scheduler.ConstantLR(o)]),
    ],
    ids=["step", "one-cycle", "sequential", "chained"],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_scheduler_inside_the_step_is_refused_before_it_moves(scheduler, fresh):
    model = mlp()
    optimizer = adam(model)
    inside = scheduler(optimizer)

    def step(batch):
        loss = update(optimizer, mse(model, batch))
        inside.step()
        return loss

    job = Job(step, model, optimizer, pairs())
    if not fresh:
        job.step(job.batch(0))
    before, moved = copied(job), str(inside.state_dict())
    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+ .*scheduler") as caught:
        capture(step, model, optimizer, job.batch(1))
    assert "after the training step" in str(caught.value)
    assert str(inside.state_dict()) == moved
    assert_same(before, copied(job))
    job.step(job.batch(1))
    assert str(inside.state_dict()) != moved


@dataclass
class Batch:
    inputs: torch.Tensor


@pytest.mark.parametrize(
    "strange", [Batch(torch.ones(2)), np.ones(2), {1, 2}, object()], ids=["object", "array", "set", "anything"]
)
def test_a_batch_that_hides_its_tensors_is_refused(strange):
    job = job_of(lambda model, inputs, targets, optimizer: (model(inputs) - targets).square().mean())
    batch = {"pair": job.batch(0), "strange": strange}
    inner = job.step
    hiding = Job(lambda batch: inner(batch["pair"]), job.model, job.optimizer, [batch])
    assert type(strange).__name__ in refused(hiding)


def test_what_looks_like_a_refusal_but_can_be_followed_is_captured():
    def body(model, inputs, targets, optimizer):
        out = model(inputs)
        if out.shape[0] > 2 and out.dim() == 2:  # shapes are not values
            out = torch.where(out > 0, out, out * 0.1)
        out[out < -5] = 0.0  # a mask that is written to keeps the shape
        at = torch.tensor([2, 0, 1])
        return (out[:, at] - targets).square().mean() + out.repeat_interleave(2, 0).mean()

    job = job_of(body)
    job.step(job.batch(0))
    assert len(capture(job.step, job.model, job.optimizer, job.batch(0)).graph) > 10


def test_code_that_is_new_in_each_step_is_named():
    model, calls = mlp(), {"n": 0}
    optimizer = adam(model)

    def step(batch):
        made: dict[str, Any] = {}
        calls["n"] += 1
        exec(f"def scaled(loss): return loss * {calls['n']}.5", made)
        update(optimizer, made["scaled"](mse(model, batch)))

    job = Job(step, model, optimizer, pairs())
    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False)
    for number in range(12):
        fast(job.batch(number))
    assert re.search(r"for the first time in each .* scaled at <string>:1\): make functions once", fast.why), fast.why
