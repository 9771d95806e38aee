"""A branch on the batch alone is a guard: the step is captured; a batch that leads elsewhere is stale, not wrong."""

import pytest
import torch

from equivalence.compare import check_twins
from hocket.tracing import capture
from quick import covering, some
from support.captures import captured_job
from tracing.recording.batch_steps import batch_of, job_of, loss_of, mask, scaled


def by_scratch(batch):
    scratch = torch.zeros(4, 6)
    scratch[:, 1:].add_(batch["mask"][:, 1:])  # written through a view
    scratch.mul_(2)
    return 2 if scratch.view(-1)[-1] == 2 else 3


def by_loop(batch):
    factor, left = 1, batch["mask"].min().float()
    while left > 0.3:
        factor, left = factor * 2, left / 2
    return factor


def by_gradient(batch):
    mask = batch["mask"].float().requires_grad_()
    (gradient,) = torch.autograd.grad((mask * mask).sum(), mask)
    return 2 if gradient.min() == 2 else 3


ONES = torch.ones(6)
ALL_OF_IT = scaled(lambda batch: 1 if batch["mask"].all() else 2)
# Each looks at "mask"; the first batches give the same outcome, the last one another.
READS = {
    "all of it": ALL_OF_IT,
    "item": scaled(lambda batch: 2 if (batch["mask"] == 0).any().item() else 3),
    "int": scaled(lambda batch: 1 + int(batch["mask"].min())),
    "float": scaled(lambda batch: float(batch["mask"].min())),
    "list": scaled(lambda batch: 1 + batch["mask"].amin(1, keepdim=True).tolist()[0][0]),
    "index": scaled(lambda batch: [1.0, 2.0, 3.0][batch["mask"].min()]),
    "slice": lambda model, batch: (model(batch["inputs"][: batch["mask"].min() + 2]) ** 2).mean(),
    "equality": scaled(lambda batch: 2 if torch.equal(batch["mask"], torch.ones_like(batch["mask"])) else 3),
    "closeness": scaled(lambda batch: 2 if torch.allclose(batch["mask"].float(), torch.ones(4, 6)) else 3),
    "scratch": scaled(by_scratch),
    "loop": scaled(by_loop),
    "gradient": scaled(by_gradient),
    "closed over": scaled(lambda batch: 2 if (batch["mask"] >= ONES).all() else 3),
    "parts": lambda model, batch: (
        model(torch.tensor_split(batch["inputs"], batch["mask"].amin(0)[-1:] + 1)[0]).square().mean()
    ),
    "membership": scaled(lambda batch: 2 if 0 in batch["mask"] else 3),
    "size": lambda model, batch: (model(batch["inputs"]) * torch.full((4, batch["mask"].min() + 2), 2.0).sum()).mean(),
}


@pytest.mark.parametrize(("read", "hole"), covering(READS, [False, True]))
def test_a_read_of_the_batch_is_captured_and_guarded(read, hole):
    batches = [batch_of(seed, mask=mask(hole=hole)) for seed in range(3)]
    captured = check_twins(lambda: job_of(READS[read], batches))
    other = batch_of(7, mask=mask(hole=not hole))
    assert captured.holds(batches[0])
    assert not captured.holds(other)
    assert captured.fits(other), "the shapes are the same"
    assert captured.begin(other) is None


@pytest.mark.parametrize("read", some(READS))
def test_mixed_batches_compute_what_eager_computes(read):
    batches = [batch_of(seed, mask=mask(hole=seed in (2, 3))) for seed in range(5)]
    check_twins(lambda: job_of(READS[read], batches), captures=3)


def test_ops_that_only_a_guard_needs_are_not_in_the_plan():
    job = job_of(ALL_OF_IT, [batch_of(0, mask=mask(hole=False))])
    captured = captured_job(job)
    assert not [op for op in captured.graph.ops if "all" in op.target or "mask" in op.name]


def test_what_the_step_spells_out_needs_no_guard():
    def body(model, batch):
        order = torch.arange(6).flip(0) * torch.tensor(2)
        return loss_of(model, batch) * (2 if order[0] == 10 and not torch.zeros(3).any() else 3)

    captured = check_twins(lambda: job_of(body, [batch_of(seed) for seed in range(3)]))
    assert not captured.trace.batch_guards.parts


def test_a_tensor_that_the_step_closes_over_is_looked_at_as_it_is_then():
    limit = torch.tensor(0.5)

    def body(model, batch):
        return loss_of(model, batch) * (2 if (batch["mask"] > limit).all() else 3)

    job = job_of(body, [batch_of(0, mask=mask(hole=False))])
    captured = captured_job(job)
    assert captured.holds(job.batch(0))
    limit.fill_(2.0)
    assert not captured.holds(job.batch(0))


def test_a_batch_that_the_guards_cannot_be_computed_for_is_stale():
    def body(model, batch):
        return loss_of(model, batch) * (2 if torch.ones(3).gather(0, batch["at"]).sum() > 0 else 3)

    job = job_of(body, [batch_of(0, at=torch.tensor([0, 1]))])
    captured = captured_job(job)
    assert captured.holds(job.batch(0))
    assert captured.begin(batch_of(0, at=torch.tensor([0, 9]))) is None


def test_a_batch_that_wants_gradients_is_read_without_recording_any():
    def body(model, batch):
        plain = {**batch, "inputs": batch["inputs"].detach()}
        return loss_of(model, plain) * (2 if batch["inputs"].sum() > 0 else 3)

    batch = batch_of(0)
    batch["inputs"] = batch["inputs"].abs().requires_grad_()
    job = job_of(body, [batch])
    job.step(batch)
    captured = capture(job.step, job.model, job.optimizer, batch)
    other = {**batch, "inputs": -batch["inputs"].detach().requires_grad_()}
    assert captured.holds(batch)
    assert not captured.holds(other)
