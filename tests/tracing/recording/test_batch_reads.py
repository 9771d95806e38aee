"""A branch on the batch alone is a guard: the step is captured; a batch that leads elsewhere is stale, not wrong.

A number of the batch that is computed with is read anew in every step. A branch on more than the batch is refused, also
where the step swallows the refusal.
"""

import sys

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same, check_twins, copied, serial, twins
from equivalence.test_steps import adam, mlp
from hocket.errors import CaptureError
from hocket.execution.threads import ThreadLanes
from hocket.job import Job
from hocket.tracing import capture
from quick import covering, some
from support.captures import captured_job
from support.refusals import fails
from support.steps import update


def job_of(body, batches, model=None) -> Job:
    """A step whose loss is ``body(model, batch)``."""
    model = model or mlp()
    optimizer = adam(model)

    def step(batch):
        return update(optimizer, body(model, batch))

    return Job(step, model, optimizer, batches)


def batch_of(seed: int, **further):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 6, generator=generator)
    return {"inputs": inputs, "targets": torch.randn(4, 3, generator=generator)} | further


def loss_of(model, batch):
    return (model(batch["inputs"]) - batch["targets"]).square().mean()


def scaled(factor):
    """A body: the loss times what `factor` makes of the batch."""
    return lambda model, batch: loss_of(model, batch) * factor(batch)


def mask(*, hole: bool) -> torch.Tensor:
    ones = torch.ones(4, 6, dtype=torch.int64)
    if hole:
        ones[:, -1] = 0
    return ones


# --- Branches ---


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


# --- Numbers ---


def function_of(batch):
    weight = batch["weight"].item()
    return (weight**2 if weight > 0.1 else weight) / (1 + batch["count"].item())


def added_up(batch):
    total = torch.tensor(0.0)
    for each in batch["mask"]:
        total += each.sum() * batch["weight"]
    return total


def loss_and_weight(model, batch):
    loss = loss_of(model, batch)
    return nn.functional.huber_loss(model(batch["inputs"]), batch["targets"], delta=batch["weight"].item()) + loss


NUMBERS = {
    "a list of tensors": scaled(lambda batch: torch.tensor([batch["mask"].min(), 2.0, batch["weight"]]).sum()),
    "an item": scaled(lambda batch: batch["weight"].item()),
    "a function of items": scaled(function_of),
    "a sum that begins as a tensor": scaled(added_up),
    "a tensor of an item": scaled(lambda batch: torch.tensor([batch["weight"].item(), 2.0]).sum()),
    "a parameter's item": scaled(lambda batch: nn.Parameter(batch["weight"].clone(), False).item()),
    "a parameter": scaled(
        lambda batch: nn.Parameter(batch["mask"][0, :1].float(), False) + nn.Parameter(batch["weight"], False)
    ),
    "of another class": scaled(lambda batch: batch["weight"].as_subclass(torch.Tensor)),
    "a divisor": scaled(lambda batch: 1 / batch["mask"].sum().item()),
    "an option of a loss": loss_and_weight,
}


def weighted(seed: int):
    generator = torch.Generator().manual_seed(seed + 50)
    further = {
        "weight": torch.rand((), generator=generator) + 0.5,
        "count": torch.tensor(seed),
        "mask": (torch.rand(4, 6, generator=generator) > 0.3).long(),
    }
    return batch_of(seed, **further)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_the_batch_is_read_anew_in_every_step(number):
    check_twins(lambda: job_of(NUMBERS[number], [weighted(seed) for seed in range(4)]))


def test_numbers_that_were_equal_are_read_anew_one_by_one():
    """Actions of a memory, say, of which a tensor is made."""
    body = scaled(lambda batch: (torch.tensor([each.item() for each in batch["many"]]) * torch.arange(4)).sum())
    many = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 1], [2, 0, 1, 1]])
    check_twins(lambda: job_of(body, [batch_of(seed, many=each) for seed, each in enumerate(many)]))


def test_a_number_of_the_batch_can_be_returned():
    model = mlp()

    def step(batch):
        loss = loss_of(model, batch)
        return {"loss": loss, "weight": batch["weight"].item(), "whole": int(batch["mask"].sum() * 0)}

    captured = capture(step, model, None, weighted(0))
    lanes = ThreadLanes(captured, serial(captured))
    for seed in range(3):
        expected, found = step(weighted(seed)), lanes(weighted(seed))
        assert found["weight"] == expected["weight"]
        assert found["whole"] == expected["whole"]
        assert torch.equal(found["loss"], expected["loss"])
    lanes.close()


def test_a_number_that_a_branch_asks_for_is_guarded():
    body = scaled(lambda batch: 2 if batch["weight"].item() == 0.5 else 3)
    batches = [batch_of(seed, weight=torch.tensor(0.5)) for seed in range(3)]
    captured = check_twins(lambda: job_of(body, batches))
    assert not captured.holds(batch_of(0, weight=torch.tensor(0.25)))


# --- Refusals ---


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
# Conditions of the step's branch.
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
    with pytest.raises(CaptureError, match=r"test_batch_reads\.py:\d+ .*reads a tensor's value"):
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
    with pytest.raises(CaptureError, match=r"test_batch_reads\.py:\d+"):
        capture(pair.planned.step, pair.planned.model, pair.planned.optimizer, pair.planned.batch(0))
    assert_same(before, copied(pair.planned))
