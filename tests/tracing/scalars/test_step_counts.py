"""Numbers that an optimizer counts, in a captured step: followed, guarded, and plain afterwards."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from equivalence.compare import check_twins
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.scalars.live import Live
from support.steps import update


class Scheduled(torch.optim.Optimizer):
    """An optimizer whose step does with its count whatever `use` says."""

    def __init__(self, params, use):
        self.use = use
        super().__init__(params, {"lr": 0.01, "decay": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", 0)
                state["count"] += 1
                p.add_(self.use(p, state["count"], group), alpha=-group["lr"])


def scheduled_job(use) -> Job:
    model = torch.nn.Linear(4, 3)
    optimizer = Scheduled(model.parameters(), use)

    def step(batch):
        return update(optimizer, model(batch).square().mean())

    return Job(step, model, optimizer, [torch.randn(5, 4) for _ in range(3)])


# The captures that six steps may need: a guard on a count fails in every step.
USES = {
    "as a factor": (lambda p, count, group: p.grad * count, 1),
    "of whole tensors": (lambda p, count, group: p.grad + torch.arange(3).sum() * count, 1),
    "made a tensor": (lambda p, count, group: p.grad * torch.tensor(count), 1),
    "in a list": (lambda p, count, group: p.grad * torch.tensor([count, 2])[0], 5),
    "as a size": (lambda p, count, group: p.grad * torch.ones(count).sum(), 5),
    "as a range": (lambda p, count, group: p.grad * torch.arange(count).sum(), 5),
    "as a slice": (lambda p, count, group: p.grad * p.flatten()[: min(count, 2)].sum(), 2),
    "as a place": (lambda p, count, group: p.grad * p.flatten()[count % 2], 5),
    "put somewhere": (lambda p, count, group: torch.zeros_like(p.grad).index_fill_(0, torch.tensor([0]), count), 1),
    "as a dimension": (lambda p, count, group: p.grad * p.softmax(count - count), 1),
    "a branch": (lambda p, count, group: p.grad if count % 3 else -p.grad, 4),
    "in a hook": (lambda p, count, group: with_hook(p, count), 1),
}


def with_hook(p, count):
    with torch.enable_grad():
        leaf = torch.ones(3, requires_grad=True)
        leaf.register_hook(lambda gradient: gradient * count)
        (leaf * 2).sum().backward()
    return p.grad * leaf.grad[0]


@pytest.mark.parametrize("name", USES)
def test_a_count_in_a_step_is_followed_or_guarded(name):
    use, captures = USES[name]
    check_twins(functools.partial(scheduled_job, use), captures=captures)


def test_numbers_have_their_true_values_while_a_step_is_recorded():
    seen = []

    def use(p, count, group):
        seen.append((group["decay"].plain if isinstance(group["decay"], Live) else group["decay"], int(count)))
        return p.grad * group["decay"]

    job = scheduled_job(use)
    job.step(job.batch(0))
    capture(job.step, job.model, job.optimizer, job.batch(0))
    assert seen[-1] == (0.5, 2)


def test_what_the_step_keeps_of_its_numbers_is_plain_afterwards():
    kept = SimpleNamespace(losses=[], table={}, last=None)

    def use(p, count, group):
        kept.table["count"] = count
        kept.last = group["lr"] * 2
        return p.grad

    job = scheduled_job(use)

    def step(batch):
        loss = job.step(batch)
        kept.losses.append(loss.item())
        return loss

    step(job.batch(0))
    capture(step, job.model, job.optimizer, job.batch(0))
    assert [type(loss) for loss in kept.losses] == [float, float]
    assert kept.losses[0] != kept.losses[1]
    assert type(kept.table["count"]) is int
    assert type(kept.last) is float
