"""One model alone: its tensors are made once, and everything that a user does with the stacked ones still works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hocket
from hocket.fusion.gradients import Parts

from .nets import Residual


def _pair(**options):
    """A plain model in double precision, and the same alone in an array that runs it as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    return model, hocket.fuse([copy.deepcopy(model)], **options)


def _own(wholes):
    """The only group's tensors."""
    [own] = Parts().of(wholes)
    return own


def _alone(array):
    return _own(array._store.all_tensors())


def _grads(array):
    return [p.grad for p in array.parameters()]


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
Y = torch.tensor([0, 1, 1, 0, 1])


def _loss(array, own):
    """The model's own computation on tensors without the models' axis."""
    template = array._store.templates[0]
    return functional.cross_entropy(torch.func.functional_call(template, dict(own), (X,)), Y)


def test_gradients_are_those_of_the_model():
    model, array = _pair()
    own = _alone(array)
    for _ in range(2):  # twice: they accumulate, as they should
        functional.cross_entropy(model(X), Y).backward()
        _loss(array, own).backward()
    for p, q in zip(model.parameters(), array.parameters(), strict=True):
        assert torch.equal(p.grad.unsqueeze(0), q.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_can_be_cleared(set_to_none):
    _, array = _pair()
    own = _alone(array)
    _loss(array, own).backward()
    first = [grad.clone() for grad in _grads(array)]
    array.zero_grad(set_to_none=set_to_none)
    _loss(array, own).backward()
    assert all(map(torch.equal, first, _grads(array)))


def test_autograd_grad_finds_the_stacked_parameters():
    _, array = _pair()
    own = _alone(array)
    loss = _loss(array, own)
    found = torch.autograd.grad(loss, list(array.parameters()), retain_graph=True)
    loss.backward()
    assert all(map(torch.equal, found, _grads(array)))


def test_gradients_can_be_differentiated_again():
    weight = nn.Parameter(torch.tensor([[2.0, 3.0]]))
    own = _own({"weight": weight})["weight"]
    [grad] = torch.autograd.grad((own**3).sum(), [weight], create_graph=True)
    grad.sum().backward()
    assert torch.equal(weight.grad, 6 * weight.detach())


def test_a_gradient_is_handed_over_without_a_copy():
    weight = nn.Parameter(torch.ones(1, 4))
    own = _own({"weight": weight})["weight"]
    seen = []
    (own * 2).register_hook(lambda grad: None)
    own.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (own * torch.arange(4.0)).sum().backward()
    assert seen == [weight.grad.data_ptr()]


def test_an_unused_parameter_has_no_gradient():
    used, unused = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.ones(1, 2))
    own = _own({"used": used, "unused": unused})
    own["used"].sum().backward()
    assert unused.grad is None
    assert torch.equal(used.grad, torch.ones(1, 2))


def test_an_update_shows_and_tensors_are_made_once():
    weight = nn.Parameter(torch.ones(1, 2))
    single = Parts()
    own = single.of({"weight": weight})[0]["weight"]
    with torch.no_grad():
        weight.add_(1)
    assert single.of({"weight": weight})[0]["weight"] is own
    assert own.tolist() == [2, 2]


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


def test_tied_parameters_are_one():
    weight = nn.Parameter(torch.ones(1, 2))
    own = _own({"a": weight, "b": weight})
    (own["a"] + own["b"]).sum().backward()
    assert own["a"] is own["b"]
    assert torch.equal(weight.grad, torch.full((1, 2), 2.0))


def test_training_alone_is_training_as_ever():
    torch.manual_seed(0)
    model = Residual().double()
    array = hocket.fuse([copy.deepcopy(model)], shared=True)
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    plain, fused = torch.optim.SGD(model.parameters(), 0.1, 0.9), hocket.optim.SGD(array.parameters(), 0.1, 0.9)
    for _ in range(3):
        plain.zero_grad()
        fused.zero_grad()
        one = functional.cross_entropy(model(x), y)
        one.backward()
        loss = array.loss(functional.cross_entropy, array(x), y)
        loss.backward()
        plain.step()
        fused.step()
        torch.testing.assert_close(loss, one.unsqueeze(0), rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), array.unfuse()[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
    other = copy.deepcopy(array)
    other(x)
    assert all(p is not q for p, q in zip(array.parameters(), other.parameters(), strict=True))


def test_the_loss_of_one_model_is_one_number_of_one():
    _, array = _pair(shared=True)
    loss = array.loss(functional.cross_entropy, array(X), Y)
    assert loss.shape == (1,)
    rows = array.loss(lambda out, y: functional.cross_entropy(out, y, reduction="none"), array(X), Y)
    assert rows.shape == (1,)
    (loss + rows).backward()
    assert all(grad is not None for grad in _grads(array))
