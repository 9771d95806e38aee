"""Gradient scaling of each model on its own, against B scalers of torch."""

import pytest
import torch

from hocket import optim
from hocket.errors import InputError
from hocket.optim import GradScaler
from optim.twins import CASES, EACH, Twins, gradient, options_of, same_bits, snapshot, trained
from support.refusals import refused

# Steps in which a model's gradients overflow.
OVERFLOWS = {0: [1], 1: [0, 1, 6], 2: []}


def scaled_gradients(twins, scales, step):
    """Gradients as a backward pass of scaled losses leaves them."""
    for place, p in enumerate(twins.params):
        p.grad = torch.stack([gradient(p[m], step, place, m) * float(scales[m]) for m in range(3)])
        for model, steps in OVERFLOWS.items():
            if step in steps:
                p.grad[model].view(-1)[0] = float("inf")


@pytest.mark.parametrize("case", CASES)
def test_each_model_has_its_scale_and_its_decision(case):
    twins = Twins(case, 3)
    settings = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    scaler = GradScaler(3, **settings)
    others = [torch.amp.GradScaler("cpu", **settings) for _ in range(3)]
    for step in range(12):
        scaled_gradients(twins, scaler.get_scale(), step)
        scaler.scale(torch.zeros(3))
        scaler.step(twins.fused)
        scaler.update()
        for model, (other, optimizer) in enumerate(zip(others, twins.torch, strict=True)):
            other.scale(torch.zeros(()))
            for place, p in enumerate(twins.singles[model]):
                p.grad = gradient(p, step, place, model) * other.get_scale()
                if step in OVERFLOWS[model]:
                    p.grad.view(-1)[0] = float("inf")
            other.step(optimizer)
            other.update()
        assert scaler.get_scale().tolist() == [other.get_scale() for other in others]
    twins.check(1e-10)
    for state, other in zip(scaler.unfuse(), others, strict=True):
        assert state == other.state_dict()


@pytest.mark.parametrize("case", EACH)
def test_an_overflow_reaches_no_neighbour(case):
    found = []
    for overflow in (False, True):
        params, optimizer = trained(case, steps=0)
        scaler = GradScaler(3)
        for step in range(5):
            for place, p in enumerate(params):
                p.grad = torch.stack([gradient(p[m], step, place, m) for m in range(3)]) * 2.0**10
                if overflow and step in (0, 3):
                    p.grad[1] = float("nan")
            scaler.unscale_(optimizer)
            optim.clip_grad_norm_(params, [1.0, 2.0, 3.0])
            scaler.step(optimizer)
            scaler.update()
        found.append([snapshot(params, optimizer, model) for model in (0, 2)])
        assert scaler.get_scale().tolist() == ([2.0**16, 2.0**14, 2.0**16] if overflow else [2.0**16] * 3)
    for clean, spoilt in zip(*found, strict=True):
        same_bits(clean, spoilt)


def test_a_whole_step_with_losses():
    twins = Twins("sgd-rates", 3)
    scaler = GradScaler(3, init_scale=[2.0, 4.0, 8.0])
    losses = torch.stack([sum((p[m] ** 2).sum() for p in twins.params) for m in range(3)])
    scaler.scale(losses).sum().backward()
    expected = [
        p - 2 * p * torch.tensor(options_of("sgd-rates", 3)["lr"], dtype=torch.float64).view(-1, *(1,) * (p.dim() - 1))
        for p in twins.params
    ]
    scaler.step(twins.fused)
    for p, value in zip(twins.params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value.detach(), rtol=1e-12, atol=0)


def test_saved_set_taken_and_turned_off():
    scaler = GradScaler(3, init_scale=[2.0, 4.0, 8.0], growth_interval=7)
    other = GradScaler(3)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale().tolist() == [2.0, 4.0, 8.0]
    assert other.state_dict() == scaler.state_dict()
    other.select_models([2, 0])
    assert other.get_scale().tolist() == [8.0, 2.0]
    scaler.update([1.0, 2.0, 3.0])
    assert scaler.get_scale().tolist() == [1.0, 2.0, 3.0]
    scaler.update(5.0)
    assert scaler.get_scale().tolist() == [5.0] * 3
    off = GradScaler(3, enabled=False)
    twins = Twins("sgd", 3)
    losses = torch.ones(3)
    assert off.scale(losses) is losses
    for p in twins.params:
        p.grad = torch.ones_like(p)
    before = twins.params[0].detach().clone()
    off.step(twins.fused)
    off.update()
    torch.testing.assert_close(twins.params[0].detach(), before - 0.1)
    assert off.state_dict() == {}


def test_refusals():
    optimizer = Twins("sgd", 3).fused
    refused("init_scale: expected 3 numbers", GradScaler, 3, init_scale=[1.0, 2.0])
    refused("num_models: expected a whole number >= 1, got 0", GradScaler, 0)
    refused(r"growth_factor: expected a number > 1, got 1\.0", GradScaler, 3, growth_factor=1.0)
    refused(r"backoff_factor: expected a number > 0 and < 1, got 1\.0", GradScaler, 3, backoff_factor=1.0)
    scaler = GradScaler(3)
    refused(r"losses: expected one for each model, of shape \(3, ...\), got \(\)", scaler.scale, torch.ones(()))
    with pytest.raises(InputError, match=r"optimizer: expected one of hocket.optim, of 3 models, got SGD$"):
        scaler.step(torch.optim.SGD([torch.ones(3)]))
    refused(r"of 3 models, got SGD of 2 models", scaler.step, Twins("sgd", 2).fused)
    refused("update: expected a call of step or unscale_ before it", scaler.update)
    scaler.unscale_(optimizer)
    refused("unscale_: expected one call for each optimizer", scaler.unscale_, optimizer)
    scaler.step(optimizer)
    refused("step: expected one call for each optimizer", scaler.step, optimizer)
    refused("step: expected no closure", scaler.step, optimizer, lambda: None)
    for wrong, match in (
        (GradScaler(2).state_dict(), "scale: expected 3 numbers, one for each model, .* got 2"),
        ({**GradScaler(3).state_dict(), "_growth_tracker": [1, 2]}, "_growth_tracker: expected 3 numbers"),
        ({**GradScaler(3).state_dict(), "scale": [1.0, float("nan"), 2.0]}, "scale: expected numbers >= 0, got nan"),
        (torch.amp.GradScaler("cpu").state_dict(), "scale: expected a number, or 3 in a list"),
    ):
        refused(match, scaler.load_state_dict, wrong)
