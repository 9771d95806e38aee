"""Calls that run by a plan that is asked for, without being timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import hocket
from hocket.fusion import single_model
from hocket.fusion.calls import run_by
from hocket.fusion.plan import ExecutionPlan, plans_for

X = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3
PLANS = plans_for(4, with_losses=True, has_images=True)


def models():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)) for _ in range(4)]
    return [each.double() for each in layers]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_that_is_asked_for_runs_and_gives_the_same(plan):
    array, own = hocket.fuse(models(), shared=True), models()
    run_by(array, plan)
    for _ in range(2):  # recorded, and by the plan
        array.zero_grad()
        array.losses(functional.cross_entropy, X, Y).backward()
        for model in own:
            model.zero_grad()
            functional.cross_entropy(model(X), Y).backward()
    weights = array.all_tensors()["0.weight"].grad
    for index, model in enumerate(own):
        assert torch.allclose(weights[index], model[0].weight.grad, rtol=1e-12, atol=1e-14)
        assert torch.allclose(array.unfuse()[index][1].running_mean, model[1].running_mean, rtol=1e-12)
    array.eval()
    with torch.no_grad():
        for _ in range(2):
            found = array(X)
    for index, model in enumerate(own):
        assert torch.allclose(found[index], model.eval()(X), rtol=1e-10)
    assert array.choices == []  # nothing was timed
    run_by(array, None)
    with torch.no_grad():
        array(X)
    assert len(array.choices) == 1


def test_one_model_may_be_asked_for_channels_last(monkeypatch):
    ran, right = [], single_model._channels_last
    monkeypatch.setattr(single_model, "_channels_last", lambda *given: ran.append(given) or right(*given))
    array, own = hocket.fuse(models()[:1], shared=True), models()[0]
    run_by(array, ExecutionPlan(1, channels_last=True))
    for each, losses in ((array, array.losses), (own, lambda fn, x, y: fn(own(x), y))):
        for _ in range(2):
            each.zero_grad()
            losses(functional.cross_entropy, X, Y).backward()
    assert ran
    assert torch.allclose(array.all_tensors()["0.weight"].grad[0], own[0].weight.grad, rtol=1e-12, atol=1e-14)


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x.mul_(0.5))


def test_models_that_write_over_their_input_run_all_at_once():
    own = [Overwriting().double() for _ in range(4)]
    array = hocket.fuse(own, shared=True)
    run_by(array, ExecutionPlan(1, per_group_backward=True))
    x = torch.ones(5, 3, dtype=torch.float64)
    for _ in range(2):
        losses = array.losses(functional.cross_entropy, x.clone(), torch.zeros(5, dtype=torch.long))
    for loss, model in zip(losses.detach().unbind(), own, strict=True):
        alone = functional.cross_entropy(model(x.clone()), torch.zeros(5, dtype=torch.long))
        assert torch.allclose(loss.as_subclass(torch.Tensor), alone.detach(), rtol=1e-12)
