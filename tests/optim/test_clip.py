"""Clipping of each model on its own, against torch's clipping of each alone."""

import math

import pytest
import torch
from tests.fusion.oracle import SIZES

from hocket.optim import clip_grad_norm_, clip_grad_value_
from optim.twins import fused_parameters, set_gradients
from support.refusals import refused

LIMITS = [0.5, 100.0, 2.0, 0.0, 1.0, 5.0, 3.0]


def pair(num_models):
    params = fused_parameters(num_models)
    alone = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    alone._hocket_model = num_models - 1
    set_gradients(params, 0, range(num_models))
    alone.grad = torch.full_like(alone, 0.7)
    idle = torch.nn.Parameter(torch.ones(num_models, 2, dtype=torch.float64))
    idle._hocket_models = num_models
    params = [*params, alone, idle]
    singles = []
    for model in range(num_models):
        own = [torch.nn.Parameter(p[model].detach().clone()) for p in params[:4]]
        for p, fused in zip(own, params, strict=False):
            p.grad = fused.grad[model].clone()
        if model == num_models - 1:
            own.append(torch.nn.Parameter(alone.detach().clone()))
            own[-1].grad = alone.grad.clone()
        singles.append(own)
    return params, singles


def check(params, singles, tolerance=1e-12):
    for model, own in enumerate(singles):
        for p, single in zip(params, own, strict=False):
            found = p.grad if hasattr(p, "_hocket_model") else p.grad[model]
            torch.testing.assert_close(found, single.grad, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("one", [False, True])
def test_norms(norm_type, num_models, one):
    params, singles = pair(num_models)
    limits = [1.5] * num_models if one else LIMITS[:num_models]
    norms = clip_grad_norm_(params, 1.5 if one else limits, norm_type)
    for model, own in enumerate(singles):
        expected = torch.nn.utils.clip_grad_norm_(own, limits[model], norm_type)
        torch.testing.assert_close(norms[model], expected, rtol=1e-12, atol=0)
    check(params, singles)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("one", [False, True])
def test_values(num_models, one):
    params, singles = pair(num_models)
    limits = [0.3] * num_models if one else LIMITS[:num_models]
    clip_grad_value_(iter(params), 0.3 if one else limits)
    for model, own in enumerate(singles):
        torch.nn.utils.clip_grad_value_(own, limits[model])
    check(params, singles, 0.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_reaches_no_neighbour(wrong):
    clean, _ = pair(3)
    spoilt, _ = pair(3)
    spoilt[0].grad[1, 0, 0] = wrong
    norms = clip_grad_norm_(clean, 0.5)
    other = clip_grad_norm_(spoilt, 0.5)
    assert not math.isfinite(other[1])
    for model in (0, 2):
        assert norms[model] == other[model]
        for p, q in zip(clean[:4], spoilt[:4], strict=True):
            assert torch.equal(p.grad[model], q.grad[model])
    spoilt, _ = pair(3)
    spoilt[0].grad[1, 0, 0] = wrong
    before = spoilt[0].grad.clone()
    refused(r"norm of order 2.0 is not finite for model \[1\]", clip_grad_norm_, spoilt, 0.5, error_if_nonfinite=True)
    torch.testing.assert_close(spoilt[0].grad, before, rtol=0, atol=0, equal_nan=True)


def test_no_gradients():
    params = fused_parameters(3)
    assert clip_grad_norm_(params, 1.0).tolist() == [0.0, 0.0, 0.0]


def test_refusals():
    params, _ = pair(3)
    refused(r"max_norm: expected 3 numbers, .* got 2: \[1, 2\]", clip_grad_norm_, params, [1, 2])
    refused(r"max_norm: expected numbers >= 0, got -1.0 for model 1", clip_grad_norm_, params, [1, -1, 1])
    refused(r"clip_value: expected numbers >= 0, got -1", clip_grad_value_, params, -1)
    refused("params: none of them is a fused parameter", clip_grad_value_, [torch.ones(3)], 1)
