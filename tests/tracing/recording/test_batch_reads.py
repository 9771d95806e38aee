"""A branch on the batch alone is a guard: the step is captured; a batch that leads elsewhere is stale, not wrong."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from equivalence.compare import Planned, assert_same, check_twins, copied, serial, twins
from equivalence.test_steps import adam, mlp
from hocket.errors import CaptureError, StaleCaptureError
from hocket.execution.threads import ThreadLanes
from hocket.job import Job
from hocket.tracing import capture
from quick import covering


def job_of(body, batches, model=None) -> Job:
    """A step whose loss is ``body(model, batch)``."""
    model = model or mlp()
    optimizer = adam(model)

    def step(batch):
        optimizer.zero_grad()
        loss = body(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, batches)


def batch_of(seed: int, **further):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 6, generator=generator)
    return {"inputs": inputs, "targets": torch.randn(4, 3, generator=generator)} | further


def loss_of(model, batch):
    return (model(batch["inputs"]) - batch["targets"]).square().mean()


# Each looks at "mask"; the first batches give the same outcome, the last one another.


def all_of_it(model, batch):
    return loss_of(model, batch) if batch["mask"].all() else loss_of(model, batch) * 2


def by_item(model, batch):
    return loss_of(model, batch) * (2 if (batch["mask"] == 0).any().item() else 3)


def by_int(model, batch):
    return loss_of(model, batch) * (1 + int(batch["mask"].min()))


def by_float(model, batch):
    return loss_of(model, batch) * float(batch["mask"].min())


def by_list(model, batch):
    return loss_of(model, batch) * (1 + batch["mask"].amin(1, keepdim=True).tolist()[0][0])


def by_index(model, batch):
    return loss_of(model, batch) * [1.0, 2.0, 3.0][batch["mask"].min()]


def by_slice(model, batch):
    return (model(batch["inputs"][: batch["mask"].min() + 2]) ** 2).mean()


def by_equality(model, batch):
    same = torch.equal(batch["mask"], torch.ones_like(batch["mask"]))
    return loss_of(model, batch) * (2 if same else 3)


def by_closeness(model, batch):
    mask = batch["mask"].float()
    return loss_of(model, batch) * (2 if torch.allclose(mask, torch.ones(4, 6)) else 3)


def by_scratch(model, batch):
    scratch = torch.zeros(4, 6)
    scratch[:, 1:].add_(batch["mask"][:, 1:])  # written through a view
    scratch.mul_(2)
    return loss_of(model, batch) * (2 if scratch.view(-1)[-1] == 2 else 3)


def by_loop(model, batch):
    loss, left = loss_of(model, batch), batch["mask"].min().float()
    while left > 0.3:
        loss, left = loss * 2, left / 2
    return loss


def by_gradient(model, batch):
    mask = batch["mask"].float().requires_grad_()
    (gradient,) = torch.autograd.grad((mask * mask).sum(), mask)
    return loss_of(model, batch) * (2 if gradient.min() == 2 else 3)


def by_closed_over(model, batch):
    return loss_of(model, batch) * (2 if (batch["mask"] >= ONES).all() else 3)


def by_parts(model, batch):
    first, _ = torch.tensor_split(batch["inputs"], batch["mask"].amin(0)[-1:] + 1)
    return model(first).square().mean()


def by_membership(model, batch):
    return loss_of(model, batch) * (2 if 0 in batch["mask"] else 3)


def by_size(model, batch):
    return (model(batch["inputs"]) * torch.full((4, batch["mask"].min() + 2), 2.0).sum()).mean()


ONES = torch.ones(6)
READS = [
    *(all_of_it, by_item, by_int, by_float, by_list, by_index, by_slice, by_equality, by_closeness, by_scratch),
    *(by_loop, by_gradient, by_closed_over, by_parts, by_membership, by_size),
]


def mask(*, hole: bool) -> torch.Tensor:
    ones = torch.ones(4, 6, dtype=torch.int64)
    if hole:
        ones[:, -1] = 0
    return ones


@pytest.mark.parametrize(
    ("body", "hole"), covering(READS, [False, True]), ids=lambda value: getattr(value, "__name__", None)
)
def test_a_read_of_the_batch_is_captured_and_guarded(body, hole):
    batches = [batch_of(seed, mask=mask(hole=hole)) for seed in range(3)]
    captured = check_twins(lambda: job_of(body, batches))
    other = batch_of(7, mask=mask(hole=not hole))
    assert captured.holds(batches[0])
    assert not captured.holds(other)
    assert captured.fits(other), "the shapes are the same"
    assert captured.begin(other) is None


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, marks=[pytest.mark.slow] * (n % 2), id=body.__name__) for n, body in enumerate(READS)],
)
def test_mixed_batches_compute_what_eager_computes(body):
    batches = [batch_of(seed, mask=mask(hole=seed in (2, 3))) for seed in range(5)]
    check_twins(lambda: job_of(body, batches), captures=3)


def test_a_stale_batch_leaves_everything_as_it_is():
    job = job_of(all_of_it, [batch_of(0, mask=mask(hole=False)), batch_of(1, mask=mask(hole=True))])
    job.step(job.batch(0))
    planned = Planned(job)
    captured = planned.capture(job.batch(0))
    lanes = ThreadLanes(captured, planned.plan(captured))
    before = copied(job)
    with pytest.raises(StaleCaptureError):
        lanes(job.batch(1))
    assert_same(before, copied(job))
    lanes(job.batch(0))
    lanes.close()


def test_ops_that_only_a_guard_needs_are_not_in_the_plan():
    job = job_of(all_of_it, [batch_of(0, mask=mask(hole=False))])
    job.step(job.batch(0))
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    assert not [op for op in captured.graph.ops if "all" in op.target or "mask" in op.name]


def test_what_the_step_spells_out_needs_no_guard():
    def body(model, batch):
        order = torch.arange(6).flip(0) * torch.tensor(2)
        return loss_of(model, batch) * (2 if order[0] == 10 and not torch.zeros(3).any() else 3)

    captured = check_twins(lambda: job_of(body, [batch_of(seed) for seed in range(3)]))
    assert not captured.trace.batch_guards.parts


# --- A number of the batch that is computed with ---


def by_weight(model, batch):
    return loss_of(model, batch) * batch["weight"].item()


def by_function_of_weight(model, batch):
    weight = batch["weight"].item()
    return loss_of(model, batch) * (weight**2 if weight > 0.1 else weight) / (1 + batch["count"].item())


def by_tensor_of_weight(model, batch):
    return loss_of(model, batch) * torch.tensor([batch["weight"].item(), 2.0]).sum()


def by_list_of_tensors(model, batch):
    weights = torch.tensor([batch["mask"].min(), 2.0, batch["weight"]])
    return loss_of(model, batch) * weights.sum()


def by_sum_of_mask(model, batch):
    return (model(batch["inputs"]) - batch["targets"]).square().sum() / batch["mask"].sum().item()


def by_loss_and_weight(model, batch):
    loss = loss_of(model, batch)
    return nn.functional.huber_loss(model(batch["inputs"]), batch["targets"], delta=batch["weight"].item()) + loss


NUMBERS = [
    by_list_of_tensors,
    by_weight,
    by_function_of_weight,
    by_tensor_of_weight,
    by_sum_of_mask,
    by_loss_and_weight,
]


def weighted(seed: int):
    generator = torch.Generator().manual_seed(seed + 50)
    further = {
        "weight": torch.rand((), generator=generator) + 0.5,
        "count": torch.tensor(seed),
        "mask": (torch.rand(4, 6, generator=generator) > 0.3).long(),
    }
    return batch_of(seed, **further)


@pytest.mark.parametrize("body", NUMBERS, ids=lambda body: body.__name__)
def test_a_number_of_the_batch_is_read_anew_in_every_step(body):
    check_twins(lambda: job_of(body, [weighted(seed) for seed in range(4)]))


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


def test_a_number_that_a_branch_asks_for_exactly_is_not_moved():
    def body(model, batch):
        return loss_of(model, batch) * (2 if batch["weight"].item() == 0.5 else 3)

    batches = [batch_of(seed, weight=torch.tensor(0.5)) for seed in range(3)]
    captured = check_twins(lambda: job_of(body, batches))
    assert not captured.holds(batch_of(0, weight=torch.tensor(0.25)))


# --- What depends on more than the batch ---


def with_buffer() -> nn.Module:
    model = mlp()
    model.register_buffer("limit", torch.tensor(1.0))
    return model


def on_a_buffer(model, batch):
    return loss_of(model, batch) * (2 if (batch["mask"] < model.limit).any() else 3)


def on_a_parameter(model, batch):
    return loss_of(model, batch) * (2 if model[0].weight.sum() > 0 else 3)


def on_randomness(model, batch):
    return loss_of(model, batch) * (2 if torch.rand(()) < batch["mask"].min() else 3)


def on_what_dropout_leaves(model, batch):
    return loss_of(model, batch) * (2 if nn.functional.dropout(batch["inputs"]).sum() > 0 else 3)


def on_a_tensor_written_from_the_model(model, batch):
    scratch = torch.zeros(4, 3)
    view = scratch[1:]
    scratch.add_(model(batch["inputs"]).detach())
    return loss_of(model, batch) * (2 if view.sum() > 0 else 3)


def on_a_batch_that_the_step_writes(model, batch):
    batch["mask"].add_(1)
    return loss_of(model, batch) * (2 if batch["mask"].min() > 1 else 3)


def on_a_number_of_the_optimizer(model, batch, optimizer=None):
    return loss_of(model, batch) * (2 if (batch["inputs"] * OPTIMIZERS[-1].param_groups[0]["lr"]).sum() > 0 else 3)


OPTIMIZERS: list[torch.optim.Optimizer] = []
IMPURE = [
    *(on_a_buffer, on_a_parameter, on_randomness, on_what_dropout_leaves, on_a_tensor_written_from_the_model),
    *(on_a_batch_that_the_step_writes, on_a_number_of_the_optimizer),
]


@pytest.mark.parametrize("body", IMPURE, ids=lambda body: body.__name__)
def test_a_branch_on_anything_else_is_refused(body):
    job = job_of(body, [batch_of(0, mask=mask(hole=False))], with_buffer())
    OPTIMIZERS.append(job.optimizer)
    job.step(job.batch(0))
    before = copied(job)
    with pytest.raises(CaptureError, match=r"test_batch_reads\.py:\d+ .*reads a tensor's value"):
        capture(job.step, job.model, job.optimizer, job.batch(0))
    assert_same(before, copied(job))


def shape_of_the_batch(model, batch):
    return model(batch["inputs"][batch["mask"][:, 0].bool()]).square().mean()


def places_in_the_batch(model, batch):
    return model(batch["inputs"])[batch["mask"][:, 0].nonzero()[:, 0]].square().mean()


def many_values(model, batch):
    return loss_of(model, batch) * len(batch["inputs"].repeat(50, 1).tolist())


@pytest.mark.parametrize("body", [shape_of_the_batch, places_in_the_batch, many_values])
def test_shapes_and_data_stay_refused(body):
    job = job_of(body, [batch_of(0, mask=mask(hole=False))])
    job.step(job.batch(0))
    with pytest.raises(CaptureError, match="depends on values"):
        capture(job.step, job.model, job.optimizer, job.batch(0))


def test_a_batch_that_shares_memory_with_a_parameter_is_no_batch():
    model = mlp()
    batch = batch_of(0, mask=model[0].weight.detach()[:2])
    job = job_of(lambda model, batch: loss_of(model, batch) * (2 if batch["mask"].sum() > 0 else 3), [batch], model)
    job.step(batch)
    with pytest.raises(CaptureError, match="reads a tensor's value"):
        capture(job.step, job.model, job.optimizer, batch)


def test_a_tensor_that_the_step_closes_over_is_looked_at_as_it_is_then():
    limit = torch.tensor(0.5)

    def body(model, batch):
        return loss_of(model, batch) * (2 if (batch["mask"] > limit).all() else 3)

    job = job_of(body, [batch_of(0, mask=mask(hole=False))])
    job.step(job.batch(0))
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    assert captured.holds(job.batch(0))
    limit.fill_(2.0)
    assert not captured.holds(job.batch(0))


def test_a_batch_that_the_guards_cannot_be_computed_for_is_stale():
    def body(model, batch):
        return loss_of(model, batch) * (2 if torch.ones(3).gather(0, batch["at"]).sum() > 0 else 3)

    job = job_of(body, [batch_of(0, at=torch.tensor([0, 1]))])
    job.step(job.batch(0))
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    assert captured.holds(job.batch(0))
    assert captured.begin(batch_of(0, at=torch.tensor([0, 9]))) is None


def test_a_batch_that_wants_gradients_is_read_without_recording_any():
    def body(model, batch):
        return loss_of(model, batch) * (2 if batch["inputs"].sum() > 0 else 3)

    batch = batch_of(0)
    batch["inputs"] = batch["inputs"].abs().requires_grad_()
    job = job_of(body, [batch])
    job.step(batch)
    captured = capture(job.step, job.model, job.optimizer, batch)
    other = {**batch, "inputs": -batch["inputs"].detach().requires_grad_()}
    assert captured.holds(batch)
    assert not captured.holds(other)


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


def test_a_refusal_after_the_last_op_is_raised():
    job = job_of(loss_of, [batch_of(0)])

    def step(batch):
        loss = job.step(batch)
        try:
            return float(loss)
        except CaptureError:
            return 0.0

    step(job.batch(0))
    with pytest.raises(CaptureError, match=r"test_batch_reads\.py:\d+"):
        capture(step, job.model, job.optimizer, job.batch(0))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_scheduler_that_the_step_tries_to_step_is_refused(fresh):
    job = job_of(loss_of, [batch_of(0)])
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)

    def step(batch):
        loss = job.step(batch)
        try:
            scheduler.step()
        except Exception:  # noqa: BLE001
            return loss * 2
        return loss

    if not fresh:
        step(job.batch(0))
    with pytest.raises(CaptureError, match="scheduler"):
        capture(step, job.model, job.optimizer, job.batch(0))


def test_a_step_without_a_refusal_is_captured_after_one_with_it():
    job = job_of(swallowed_float, [batch_of(0)])
    job.step(job.batch(0))
    with pytest.raises(CaptureError):
        capture(job.step, job.model, job.optimizer, job.batch(0))
    other = job_of(loss_of, [batch_of(0)])
    other.step(other.batch(0))
    assert len(capture(other.step, other.model, other.optimizer, other.batch(0)).graph)
