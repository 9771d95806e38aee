"""Weights that layers have in common, where some of these layers stay separate."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.oracle import assert_close, assert_same_parameters, check, made
from torch import nn

import hocket
from hocket.errors import InputError


class Tied(nn.Module):
    """An embedding and an output layer of one weight, around a layer of its own."""

    def __init__(self, padding: int | None = None, tag: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=padding)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.out = nn.Linear(6, 9)
        self.out.weight = self.words.weight
        if tag is not None:
            self.out.tag = tag

    def forward(self, x):
        return self.out(self.middle(self.words(x)).mean(1))


class Root(Tied):
    """Has the weight once more."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__(padding)
        self.weight = self.words.weight


DIFFERENCES = {
    "paddings": [lambda padding=padding: Tied(padding) for padding in (0, None, 3)],
    "a tag of the output layer": [lambda tag=tag: Tied(tag=tag) for tag in (1, 2, 3)],
}
BOTH = {"words", "out"}


def words() -> torch.Tensor:
    return torch.randint(0, 9, (4, 5))


@pytest.mark.parametrize("backend", ["rule", "loop", "auto"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_layer_tied_to_one_that_differs_stays_separate_with_it(name, backend):
    makers = iter(DIFFERENCES[name])
    models = made(lambda: next(makers)(), 3)
    array = check(models, words(), shared=True, backend=backend)
    assert set(array._store.reasons) == BOTH
    assert "weight is" in array.report()
    assert all(model.out.weight is model.words.weight for model in array.unfuse())


@pytest.mark.parametrize("separate", [["words"], ["out"], ["words", "out"]])
def test_training_keeps_the_tie(separate):
    models = made(Tied, 3)
    array = hocket.fuse([copy.deepcopy(model) for model in models], separate=separate, shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=[0.1, 0.2, 0.3], momentum=0.9)
    plain = [torch.optim.SGD(model.parameters(), lr=0.1 * place, momentum=0.9) for place, model in enumerate(models, 1)]
    for _ in range(3):
        x = words()
        optimizer.zero_grad()
        array(x).square().sum().backward()
        optimizer.step()
        for model, each in zip(models, plain, strict=True):
            each.zero_grad()
            model(x).square().sum().backward()
            each.step()
    assert_same_parameters(array, models)


@pytest.mark.parametrize("tag", [None, 7], ids=["values", "another layer"])
def test_a_model_that_comes_into_a_slot_keeps_its_tie(tag):
    array = hocket.fuse(made(Tied, 3), separate=["out"], shared=True)
    (new,) = made(lambda: Tied(tag=tag), 1)
    array.refill(1, copy.deepcopy(new))
    x = words()
    assert_close(array(x)[1].detach(), new(x).detach(), "output")
    (back,) = [model for place, model in enumerate(array.unfuse()) if place == 1]
    assert back.out.weight is back.words.weight
    array(x)[1].sum().backward()
    new(x).sum().backward()
    own = array._store.group(array._store.separate_index["words"])[1].weight
    assert_close(own.grad, new.words.weight.grad, "gradient")


def test_a_model_without_the_tie_may_come_into_a_slot():
    array = hocket.fuse(made(Tied, 3), separate=["words", "out"], shared=True)
    (new,) = made(Tied, 1)
    new.out.weight = nn.Parameter(torch.ones(9, 6).double())
    array.refill(1, copy.deepcopy(new))
    x = words()
    assert_close(array(x)[1].detach(), new(x).detach(), "output")
    backs = array.unfuse()
    assert [back.out.weight is back.words.weight for back in backs] == [True, False, True]


def test_where_nothing_remains_each_layer_has_its_reason():
    paddings = iter([0, 1])
    with pytest.raises(InputError, match=r"words: padding_idx: 0 .*; out: weight is words.weight, and words stays sep"):
        hocket.fuse([without_middle(next(paddings)) for _ in range(2)])
    paddings = iter([0, 1])
    with pytest.raises(InputError, match=r"models differ: weight is words.weight, and words stays separate: padding_i"):
        hocket.fuse([Root(next(paddings)) for _ in range(2)])


def without_middle(padding: int) -> nn.Module:
    model = Tied(padding)
    model.middle, model.out.bias = nn.Identity(), None
    return model
