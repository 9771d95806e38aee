"""Capture runs the step for real, and afterwards nothing shows that it did: not even when it fails half-way."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same, bits, copied, everything
from equivalence.test_lanes import small_net
from equivalence.test_places import Counting
from equivalence.test_steps import adam, mlp, mse, simple
from equivalence.test_zoo import load
from hocket.errors import CaptureError
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.program import compile_action
from hocket.tracing.recording.record import record_step
from hocket.tracing.state import inventory
from quick import covering
from support.captures import captured_job


class FailsError(RuntimeError):
    pass


def own_average() -> Job:
    """Writes a tensor that is neither parameter nor buffer nor state, and its batch."""
    job = simple(mse)
    average = torch.zeros(8, 6)

    def step(batch):
        batch[0].mul_(0.5)
        loss = job.step(batch)
        with torch.no_grad():
            average.lerp_(job.model[0].weight, 0.1)
        return loss

    made = Job(step, job.model, job.optimizer, job.batches)
    object.__setattr__(made, "average", average)
    return made


JOBS = {
    "small net": small_net,
    "dcgan": lambda: load("dcgan", "adam"),
    "buffers exchanged": lambda: simple(mse, Counting(exchanged=True)),
    "plain sgd": lambda: load("mlp", "sgd"),
    "tensors of its own": own_average,
    "cleared at the end": lambda: cleared_at_the_end(),
}


def cleared_at_the_end() -> Job:
    model = mlp()
    optimizer = adam(model)

    def step(batch):
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Job(step, model, optimizer, simple(mse).batches)


def identities(job: Job) -> list[tuple[str, int]]:
    """The object in each place: a tensor of the same value would not do."""
    return [(name, id(value)) for name, value in everything(job) if isinstance(value, torch.Tensor)]


def hooks(job: Job) -> list[int]:
    tables = []
    for model in job.models:
        for module in model.modules():
            tables += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    for optimizer in job.optimizers:
        tables += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [len(table) for table in tables]


@pytest.mark.parametrize(("name", "fresh", "fails"), covering(JOBS, [True, False], [False, True]))
def test_everything_is_as_it_was(name, fresh, fails):
    job = JOBS[name]()
    if not fresh:
        job.step(job.batch(0))

    def step(batch):
        result = job.step(batch)
        if fails and torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise FailsError
        return result

    own = getattr(job, "average", torch.zeros(1))
    kept, batch = [bits(t).clone() for t in (own, job.batch(1)[0])], job.batch(1)
    before, places, numbers, counted = copied(job), identities(job), torch.get_rng_state(), hooks(job)
    mode = torch.is_grad_enabled(), torch.get_num_threads(), vars(math).copy()
    if fails:
        with pytest.raises(CaptureError, match="FailsError"):
            capture(step, job.model, job.optimizer, batch)
    else:
        capture(step, job.model, job.optimizer, batch)
    if fresh:
        # A first step for real comes before the trace where there is no state: places that Hocket knows are put
        # back after it, tensors that only the step knows are not.
        kept[0] = bits(own)
    assert all(map(torch.equal, kept, [bits(t) for t in (own, batch[0])]))
    assert_same(before, copied(job))
    assert identities(job) == places
    assert torch.equal(torch.get_rng_state(), numbers)
    assert hooks(job) == counted
    assert (torch.is_grad_enabled(), torch.get_num_threads(), vars(math)) == mode
    if fresh:
        assert not any(optimizer.state for optimizer in job.optimizers)
        assert not any(p.grad is not None for model in job.models for p in model.parameters())


def test_a_rehearsal_changes_nothing_either():
    job = small_net()
    captured = captured_job(job)
    before = copied(job)
    frame = captured.rehearse()
    with torch.random.fork_rng([]), torch.no_grad():
        for action in captured.program.actions:
            compile_action(action)(frame.values, frame.numbers)
    assert_same(before, copied(job))


def test_the_captured_step_can_be_thrown_away():
    model = nn.Linear(3, 3)
    job = simple(mse, model, [(torch.randn(2, 3), torch.randn(2, 3))])
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    gone = weakref.ref(model)
    del job, captured, model
    gc.collect()
    assert gone() is None


def test_a_users_error_is_told_and_kept_as_the_cause():
    job = simple(mse)

    def step(batch):
        raise FailsError("not today")

    with pytest.raises(CaptureError, match="FailsError: not today") as caught:
        capture(step, job.model, torch.optim.SGD(job.model.parameters(), lr=0.1), job.batch(0))
    assert isinstance(caught.value.__cause__, FailsError)


def test_a_step_that_is_recorded_and_stays_keeps_no_copies_of_what_it_writes(monkeypatch):
    job = load("mlp", "adam")
    job.step(job.batch(0))
    sizes: list[int] = []
    plain = torch.UntypedStorage.clone

    def clone(storage):
        sizes.append(storage.nbytes())
        return plain(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone)
    assert record_step(job.step, inventory(job.model, job.optimizer), job.batch(1)).trace is not None
    assert all(size <= 8 for size in sizes)
