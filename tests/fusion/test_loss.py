"""Losses: one per model, each with its own gradient."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from tests.fusion.losses import GO, D, X, Y, linears
from tests.fusion.oracle import assert_close, assert_each, made
from tests.fusion.prefer import ALL, prefer
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hocket


def test_a_sum_a_scale_and_a_model_that_is_not_finite():
    models = made(lambda: nn.Linear(4, 3), 3)
    models[1].weight.data.fill_(torch.nan)
    x, target = torch.randn(5, 4).double(), torch.randint(0, 3, (5,))
    gradients = []
    for backward in (
        lambda loss: loss.backward(),
        lambda loss: loss.sum().backward(),
        lambda loss: (loss * 1).backward(),
    ):
        array = hocket.fuse(models, backend="rule")
        backward(array.loss(F.cross_entropy, array(x), target))
        gradients.append(array.get_parameter("fused.weight").grad)
    assert torch.equal(gradients[0][[0, 2]], gradients[1][[0, 2]])
    assert torch.equal(gradients[0][[0, 2]], gradients[2][[0, 2]])
    assert gradients[0][[0, 2]].isfinite().all()
    assert gradients[0][1].isnan().all()


def test_numbers_of_losses_and_what_is_kept_of_them_are_plain():
    array = hocket.fuse(made(lambda: nn.Linear(4, 3), 2), backend="rule", shared=True)
    losses = array.loss(F.cross_entropy, array(X[:, :4]), Y)
    assert [f"{each:.3f}" for each in losses] == [f"{each:.3f}" for each in losses.tolist()]
    for kept in (losses.detach(), losses[0], losses.sum(), losses.min(0).values, losses.clone().detach().cpu()):
        assert type(kept) is torch.Tensor
    (losses / 2)[:].backward()
    assert array.get_parameter("fused.weight").grad is not None


def test_outputs_without_a_models_axis_are_refused():
    array = hocket.fuse([nn.Linear(4, 3) for _ in range(3)])
    with pytest.raises(hocket.errors.InputError, match=r"outputs of shape \(3, N, ...\)"):
        array.loss(F.mse_loss, torch.ones(5, 3), torch.ones(5, 3))


def test_targets_that_do_not_fit_are_restated():
    array = hocket.fuse([nn.Linear(4, 3) for _ in range(3)], backend="rule")
    out = array(torch.ones(5, 4))
    with pytest.raises(hocket.errors.InputError, match=r"loss: .* shapes \(3, 5, 3\), \(4,\), 3 models: .*batch_size"):
        array.loss(F.cross_entropy, out, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        hocket.errors.InputError, match=r"loss: .* \(3, 5, 3\), \(5,\), 3 models: Target 7 is out of bounds"
    ):
        array.loss(F.cross_entropy, out, torch.full((5,), 7))


@pytest.mark.parametrize("fn", [F.mse_loss, nn.MSELoss(), F.l1_loss, F.huber_loss, F.cross_entropy])
@pytest.mark.parametrize("num_models", [1, 3])
def test_under_autocast_a_loss_has_the_type_that_it_has_alone(fn, num_models):
    """torch takes most losses of half-precision outputs and targets in single precision."""
    models = [nn.Linear(8, 8) for _ in range(num_models)]
    array = hocket.fuse(models, backend="rule", shared=True)
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        target = torch.randint(8, (16,)) if fn is F.cross_entropy else torch.randn(16, 8).bfloat16()
        losses, plain = array.loss(fn, array(x), target), fn(models[-1](x), target)
    assert losses.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(losses[-1].detach().as_subclass(torch.Tensor), plain.detach())


class Remembers(nn.Module):
    """A loss that leaves traces of its calls in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.total, self.weight, self.drawn = [], torch.zeros((), dtype=D), 1.0, random.Random(3)
        self.register_buffer("mean", torch.zeros(3, dtype=D))


def appends(self, out):
    self.log.append(out.detach().sum())


def sums_up(self, out):
    self.total = self.total + out.detach().sum()


def counts_down(self, _):
    self.weight *= 0.5


def draws(self, _):
    self.weight = self.drawn.random()


def averages(self, out):
    self.mean.mul_(0.5).add_(out.detach().mean(0))


@pytest.mark.parametrize("way", [ALL, GO])
@pytest.mark.parametrize("act", [appends, sums_up, counts_down, draws, averages])
def test_a_loss_is_called_for_each_model_where_it_leaves_a_trace(act, way, monkeypatch):
    def loss(memory):
        def called(out, target):
            act(memory, out)
            return memory.weight * F.cross_entropy(out + memory.mean, target)

        return called

    prefer(monkeypatch, way)
    models, fused, alone = linears(), Remembers(), Remembers()
    array, of_all, of_one = hocket.fuse(models, shared=True), loss(fused), loss(alone)
    with pytest.warns(UserWarning, match="hocket.fuse: loss: it .*; it is called for one model after another"):
        losses = [array.losses(of_all, X, Y)]
    losses += [array.losses(of_all, X, Y) for _ in range(2)]
    for each in losses:
        assert_each(each, [of_one(model(X), Y) for model in models], "loss")
    assert_close(torch.tensor(fused.log, dtype=D), torch.tensor(alone.log, dtype=D), "log")
    for name in ("total", "mean"):
        assert_close(getattr(fused, name), getattr(alone, name), name)
    assert fused.weight == alone.weight


def test_a_loss_that_checks_values_is_called_once_for_all_models(monkeypatch):
    def loss(out, target):
        assert out.abs().max() < 9
        return -torch.distributions.Categorical(logits=out).log_prob(target).mean()

    models, calls = linears(), []
    array = hocket.fuse(models, backend="rule", shared=True)
    each = hocket.fusion.loss._each
    monkeypatch.setattr("hocket.fusion.loss._each", lambda *given: calls.append(1) or each(*given))
    for _ in range(5):
        assert_each(array.losses(loss, X, Y), [loss(model(X), Y) for model in models], "loss")
    assert len(calls) == 2, "the first call is watched, the second one shows that it branches"
    with pytest.raises(AssertionError, match="9"):
        array.losses(loss, X * torch.nan, Y)


@pytest.mark.parametrize(
    "combined",
    [
        lambda losses, other: losses / 4,
        lambda losses, other: losses + 0.5 * other,
        lambda losses, other: torch.ones(2).double() - losses.mul(3),
        lambda losses, other: -(losses**2).clamp(max=2.0),
    ],
)
def test_what_is_computed_of_losses_goes_backward_while_a_step_is_traced(combined):
    models = made(lambda: nn.Linear(6, 3), 2)
    array, x, y = hocket.fuse(models, backend="rule"), torch.randn(5, 6).double(), torch.randn(5, 3).double()
    grads = []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        array.zero_grad()
        with mode:
            combined(array.losses(F.mse_loss, x, y), array.losses(F.l1_loss, x, y)).backward()
        grads.append([parameter.grad for parameter in array.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_batch_of_one_that_is_squeezed():
    class Squeezed(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze()

    models = made(lambda: Squeezed(6, 1), 3)
    array = hocket.fuse(models, shared=True)
    for size in (5, 1, 1):
        x, y = torch.randn(size, 6).double(), torch.randn(size).double().squeeze()
        assert_each(array.losses(F.mse_loss, x, y), [F.mse_loss(model(x), y) for model in models])
