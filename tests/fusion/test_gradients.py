"""Parts of stacked parameters, and the way of their gradients back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hocket
from hocket.fusion.gradients import Parts


def _parts(whole):
    return [own["weight"] for own in Parts().of({"weight": whole})]


def test_as_of_unbind():
    torch.manual_seed(0)
    whole, other = (nn.Parameter(torch.arange(12.0).view(6, 2)) for _ in range(2))
    for used in (slice(None), slice(0, 1), slice(1, None)):  # parts that nobody uses have no gradient
        factors = [torch.randn(2) for _ in range(6)]
        for parts, of in ((_parts(whole), whole), (other.unbind(0), other)):
            of.grad = None
            assert all(map(torch.equal, parts, of.unbind(0)))
            sum((part * factor).sum() for part, factor in list(zip(parts, factors, strict=False))[used]).backward()
        assert torch.equal(whole.grad, other.grad)


def test_gradients_can_be_differentiated_again():
    whole = nn.Parameter(torch.arange(1.0, 7.0).view(6, 1))
    loss = sum((part**3).sum() for part in _parts(whole))
    [grad] = torch.autograd.grad(loss, [whole], create_graph=True)
    grad.sum().backward()
    assert torch.equal(whole.grad, 6 * whole.detach())


def _pair(**options):
    """A plain model in double precision, and the same alone in an array that runs it as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    return model, hocket.fuse([copy.deepcopy(model)], **options)


def _own(wholes):
    """The only group's tensors."""
    [own] = Parts().of(wholes)
    return own


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def test_a_gradient_is_handed_over_without_a_copy():
    weight = nn.Parameter(torch.ones(1, 4))
    own = _own({"weight": weight})["weight"]
    seen = []
    (own * 2).register_hook(lambda grad: None)
    own.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (own * torch.arange(4.0)).sum().backward()
    assert seen == [weight.grad.data_ptr()]


@pytest.mark.parametrize("backend", ["auto", "rule", "vmap", "loop"])
@pytest.mark.parametrize("num_models", [1, 3])
def test_an_update_between_forward_and_backward_is_an_error(num_models, backend):
    array = hocket.fuse([_pair()[0] for _ in range(num_models)], backend=backend, shared=True)
    for _ in range(3):
        loss = array(X).sum()
        with torch.no_grad():
            for parameter in array.parameters():
                parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("change", ["data", "requires_grad", "other"])
def test_tensors_follow_what_becomes_of_the_stacked_ones(change):
    weight = nn.Parameter(torch.ones(1, 2))
    single = Parts()
    single.of({"weight": weight})
    if change == "data":
        weight.data = torch.full((1, 2), 5.0)
    elif change == "requires_grad":
        weight.requires_grad_(False)
    else:
        weight = nn.Parameter(torch.full((1, 2), 7.0))
    own = single.of({"weight": weight})[0]["weight"]
    assert torch.equal(own, weight.detach()[0])
    assert own.requires_grad == weight.requires_grad
    if own.requires_grad:
        own.sum().backward()
        assert torch.equal(weight.grad, torch.ones(1, 2))
