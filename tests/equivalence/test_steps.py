"""The shapes that a training step takes in the wild: planned steps are eager steps, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from equivalence.compare import check_twins
from hocket.job import Job


def mlp(**options) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, **options), nn.Tanh(), nn.Linear(8, 3, **options))


def pairs(dtype: torch.dtype | None = None) -> list:
    return [(torch.randn(4, 6, dtype=dtype), torch.randn(4, 3, dtype=dtype)) for _ in range(3)]


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=1e-2)


def simple(loss_of, model=None, batches=None, *, clear=None, before_update=None, answer=None, optimizer=None) -> Job:
    """A job whose parts can be exchanged: how gradients are cleared, what comes before the update, what it returns."""
    model = model or mlp()
    optimizer = optimizer or adam(model)

    def step(batch):
        (clear or optimizer.zero_grad)()
        loss = loss_of(model, batch)
        loss.backward()
        if before_update:
            before_update(model)
        optimizer.step()
        return answer(loss) if answer else loss

    return Job(step, model, optimizer, batches or pairs())


def mse(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("kind", [1, 2, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_clipped_by_norm(kind, foreach):
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind, foreach=foreach)

    check_twins(lambda: simple(mse, before_update=clip))


def test_gradients_clipped_by_value():
    check_twins(lambda: simple(mse, before_update=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)))


def test_gradients_that_are_zeroed_in_place():
    def make():
        job = simple(mse)
        return simple(mse, job.model, optimizer=job.optimizer, clear=lambda: job.optimizer.zero_grad(set_to_none=False))

    check_twins(make)


def test_gradients_that_are_never_cleared():
    check_twins(lambda: simple(mse, clear=lambda: None))


def test_a_penalty_on_gradients_of_gradients():
    def penalised(model, batch):
        inputs = batch[0].clone().requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return F.mse_loss(out, batch[1]) + (slope.norm(dim=1) - 1).square().mean()

    check_twins(lambda: simple(penalised))


@pytest.mark.parametrize(
    "answer",
    [
        lambda loss: {"loss": loss, "twice": loss * 2, "name": "mse"},
        lambda loss: (loss, [loss.detach(), 3]),
        lambda loss: loss.item(),
        lambda loss: {"loss": loss.item(), "tensor": loss},
        lambda loss: None,
    ],
    ids=["dict", "tuple", "number", "number and tensor", "nothing"],
)
def test_what_a_step_returns(answer):
    check_twins(lambda: simple(mse, answer=answer))


def test_one_object_at_two_places_of_a_result_stays_one():
    job = simple(mse, answer=lambda loss: {"loss": loss, "log": [loss, loss.detach()]})
    fast = hocket.schedule(job.step, job.model, job.optimizer, guard=False, cache=False)
    results = [fast(pairs()[0]) for _ in range(18)]
    assert str(fast.verdict) == "planned"
    assert all(out["loss"] is out["log"][0] is not out["log"][1] for out in results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.bfloat16])
def test_models_of_other_types(dtype):
    def loss_of(model, batch):
        return (model(batch[0]) - batch[1]).abs().square().mean()

    check_twins(lambda: simple(loss_of, mlp(dtype=dtype), pairs(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_within_the_step(dtype, backward_inside):
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5), nn.LayerNorm(5))
        optimizer = adam(model)

        def step(batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = F.cross_entropy(model(batch[0]), batch[1])
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            optimizer.step()
            return loss

        return Job(step, model, optimizer, [(torch.randn(3, 3, 6, 6), torch.randint(0, 5, (3,))) for _ in range(3)])

    check_twins(make)


def test_autocast_around_the_step():
    check_twins(lambda: simple(mse), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    def loss_of(model, batch):
        hidden = checkpoint(model[0], batch[0].clone().requires_grad_(), use_reentrant=reentrant)
        return F.mse_loss(checkpoint(model[1:], hidden, use_reentrant=reentrant), batch[1])

    check_twins(lambda: simple(loss_of))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_rewind_the_random_numbers(reentrant):
    def loss_of(model, batch):
        inputs = batch[0].clone().requires_grad_()
        return F.mse_loss(checkpoint(model, inputs, use_reentrant=reentrant), batch[1])

    check_twins(lambda: simple(loss_of, nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))))


def test_random_numbers_that_a_step_draws_again():
    def loss_of(model, batch):
        state = torch.get_rng_state()
        first = F.dropout(model(batch[0]))
        torch.set_rng_state(new_state=state)
        return F.mse_loss(F.dropout(first), batch[1])

    check_twins(lambda: simple(loss_of))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 1.9 * x * gradient  # wrong on purpose: the user's backward is what counts


def test_an_autograd_function_of_the_users_own():
    check_twins(lambda: simple(lambda model, batch: F.mse_loss(Square.apply(model(batch[0])), batch[1])))


def clamp(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def test_hooks_on_tensors_and_parameters():
    def make():
        job = simple(mse)
        job.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        job.model[2].weight.register_post_accumulate_grad_hook(clamp)
        return job

    check_twins(make)
