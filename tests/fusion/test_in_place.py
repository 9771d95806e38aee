"""Writes over an input: by activations, only where nothing else reads it, and by the forward's own items."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import assert_each, check, check_state, made
from torch import nn
from torch.nn import functional

import hocket
from quick import covering

D = torch.float64
BACKENDS = ["rule", "vmap", "loop", "auto"]


class Net(nn.Module):
    """Readers of what an activation reads: none, another op, the output."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        y = self.fc(x)
        if self.kind == "linear":
            y = functional.relu(y)
        elif self.kind == "norm":
            y = functional.relu6(self.norm(y))
        elif self.kind == "residual":
            y = torch.relu(y + x)
        elif self.kind == "input":
            y = torch.relu(x) + x + y
        elif self.kind == "two readers":
            y = torch.relu(y) + y
        elif self.kind == "exp":
            y = torch.relu(torch.exp(y))
        elif self.kind == "mask":
            y = y * 1
            y[y < 0] = 0.1
        elif self.kind == "rows":
            y = y * 1
            y[y[:, 0] > 0] = 0.5
        elif self.kind == "weight":
            y = y * 1
            y[y < 0] = self.out.bias[0]
        elif self.kind == "output":
            return y, self.out(torch.relu(y))
        return self.out(y), y


KINDS = ("linear", "norm", "residual", "input", "two readers", "exp", "mask", "rows", "weight", "output")


@pytest.mark.filterwarnings("ignore:hocket.fuse. the model itself. setitem has no rule")
@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_models_own(kind, backend, num_models):
    vanishing = {"fc.bias"} if kind == "norm" else set()
    models, x = made(lambda: Net(kind), num_models), torch.randn(5, 4, dtype=D)
    check(models, x, shared=True, backend=backend, steps=3, vanishing=vanishing)


@pytest.mark.parametrize("num_models", [1, 2])
def test_it_saves_a_tensor(num_models):
    """The activation's output is where its input was."""
    array = hocket.fuse(
        [nn.Sequential(nn.Linear(3, 2), nn.ReLU()) for _ in range(num_models)], backend="rule", shared=False
    )
    array(torch.ones(num_models, 5, 3))
    with torch.profiler.profile() as profile:
        array(torch.ones(num_models, 5, 3))
    names = {event.key for event in profile.key_averages()}
    assert "aten::relu_" in names
    assert "aten::relu" not in names


class WritesOver(nn.Module):
    """Begins with an activation in place, on the input that it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.LeakyReLU(0.5, inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.first(x))


@pytest.mark.parametrize("num_models", [1, 3])
def test_a_model_that_begins_with_dropout_in_place_can_be_called(num_models):
    models = made(lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 3)), num_models)
    array = hocket.fuse(models, shared=True)
    for _ in range(3):
        x = torch.ones(5, 4).double()
        array.losses(functional.mse_loss, x, torch.zeros(5, 3).double()).backward()
        assert all(p.grad.isfinite().all() for p in array.parameters())
        assert set(x.unique().tolist()) <= {0.0, 1.0, 2.0}, "dropped once at most"


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize(("backend", "shared"), covering(BACKENDS, [True, False]))
def test_a_model_that_writes_over_its_input_does_so_once(backend, shared, num_models):
    models = made(WritesOver, num_models)
    array = hocket.fuse(models, backend=backend, shared=shared)
    for _ in range(3):
        x = torch.randn((5, 4) if shared else (num_models, 5, 4), dtype=D)
        given = x.clone()
        out = array(given)
        assert torch.equal(given, functional.leaky_relu(x, 0.5))
        own = [x] * num_models if shared else x
        assert_each(out, [model(each.clone()) for model, each in zip(models, own, strict=True)])


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("way", ["call", "losses"])
def test_a_model_that_writes_over_its_input_trains(way, num_models):
    models = made(WritesOver, num_models)
    array = hocket.fuse(models, shared=True)
    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 3, dtype=D)
    for _ in range(3):
        given = x.clone()
        array.zero_grad()
        if way == "call":
            array.loss(functional.mse_loss, array(given), y).backward()
        else:
            array.losses(functional.mse_loss, given, y).backward()
        assert torch.equal(given, functional.leaky_relu(x, 0.5))
    for model in models:
        functional.mse_loss(model(x.clone()), y).backward()
    check_state(array, models)
