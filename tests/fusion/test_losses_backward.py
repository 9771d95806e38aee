"""Backward passes from `array.losses`: weights, accumulation, `autograd.grad`, and none where none is asked for."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.losses import GO, D, W, X, Y, ordinary, pair, same_gradients
from tests.fusion.oracle import assert_close
from tests.fusion.prefer import ALL, winner
from torch import Tensor
from torch.nn import functional as F

from support.refusals import refused

BACKWARDS = {
    "backward": lambda losses: losses.backward(),
    "sum": lambda losses: losses.sum().backward(),
    "mean": lambda losses: losses.mean().backward(),
    "weights": lambda losses: (losses * W).sum().backward(),
    "one of them": lambda losses: losses[1].backward(),
    "a gradient": lambda losses: losses.backward(W),
    "a gradient of ones": lambda losses: losses.backward(gradient=torch.ones(3, dtype=D)),
    "a gradient in another type": lambda losses: losses.backward(gradient=W, retain_graph=True),
    "something after": lambda losses: (losses.exp() * 2).sum().backward(),
    "torch.autograd.backward": lambda losses: torch.autograd.backward([losses], [W]),
}


@pytest.mark.parametrize("way", [ALL, GO])
@pytest.mark.parametrize("name", BACKWARDS)
def test_weights_of_losses(name, way, monkeypatch):
    array, other = pair(monkeypatch, way)
    for _ in range(2):
        for each in (array, other):
            each.zero_grad()
        BACKWARDS[name](array.losses(F.cross_entropy, X, Y))
        BACKWARDS[name](ordinary(other))
        same_gradients(array, other)
    assert winner(array) == way


@pytest.mark.parametrize("way", [ALL, GO])
def test_gradients_as_autograd_grad_gives_them(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    found = torch.autograd.grad(array.losses(F.cross_entropy, X, Y).sum(), list(array.parameters()))
    expected = torch.autograd.grad(ordinary(other).sum(), list(other.parameters()))
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two, "gradient")
    assert all(p.grad is None for p in array.parameters())


@pytest.mark.parametrize("way", [ALL, GO])
def test_gradients_accumulate(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    batches = [(torch.randn(4, 6, dtype=D), torch.randint(0, 3, (4,))) for _ in range(3)]
    for x, y in batches:
        array.losses(F.cross_entropy, x, y).backward()
        ordinary(other, x=x, y=y).backward()
        same_gradients(array, other)
    for each in (array, other):
        each.zero_grad()
    sum(array.losses(F.cross_entropy, x, y) for x, y in batches).sum().backward()
    sum(ordinary(other, x=x, y=y) for x, y in batches).sum().backward()
    same_gradients(array, other)
    first, second = (array.losses(F.cross_entropy, x, y) for x, y in batches[:2])
    for x, y in (batches[1], batches[0]):
        ordinary(other, x=x, y=y).backward()
    second.backward()  # the other way round
    first.backward()
    same_gradients(array, other)


def test_gradients_are_handed_over_once(monkeypatch):
    array, other = pair(monkeypatch)
    losses = array.losses(F.cross_entropy, X, Y)
    losses.backward(retain_graph=True)
    refused(r"handed over once.*array\.loss", losses.backward)
    ordinary(other).backward()
    same_gradients(array, other)  # the second did nothing
    for create_graph in (
        lambda losses: losses.backward(create_graph=True),
        lambda losses: torch.autograd.grad(losses.sum(), list(array.parameters()), create_graph=True),
    ):
        refused(r"differentiate twice.*array\.loss", create_graph, array.losses(F.cross_entropy, X, Y))
    same_gradients(array, other)


@pytest.mark.parametrize("way", [ALL, GO])
def test_losses_that_nobody_backpropagates_leave_no_gradient(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    kept = [array.losses(F.cross_entropy, X * factor, Y) for factor in (1, 2, 3)]
    assert all(p.grad is None for p in array.parameters())
    array.losses(F.cross_entropy, X, Y).backward()
    ordinary(other).backward()
    same_gradients(array, other)
    for each in (array, other):
        each.zero_grad()
    kept[1].backward()  # its gradients have waited, untouched
    ordinary(other, x=X * 2).backward()
    same_gradients(array, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_goes_backward(mode, monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y).backward()
    array.zero_grad()
    choices = len(array.choices)
    with mode():
        losses = array.losses(F.cross_entropy, X, Y)
        expected = ordinary(other)
    assert not losses.requires_grad
    assert_close(losses.as_subclass(Tensor), expected.as_subclass(Tensor), "losses")
    assert all(p.grad is None for p in array.parameters())
    assert all(not choice.winner.per_group_backward for choice in array.choices[choices:])
    array.losses(F.cross_entropy, X, Y).backward()
    ordinary(other).backward()
    same_gradients(array, other)
