"""Models that differ in what no parameter shows: each computes with its own, fused or one after another."""

from __future__ import annotations

import types
from functools import partial

import numpy as np
import pytest
import torch
from tests.fusion.oracle import assert_close, check, made
from torch import nn
from torch.nn import functional as F

import hocket

D = torch.float64
BACKENDS = ["rule", "vmap", "loop", "auto"]
pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


class Calls(nn.Module):
    """A linear layer, then what it is given: a function of the module and the layer's output."""

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, self.fc(x))


def scaled(m, x, by=1.0):
    return x * by


def closure(by):
    return lambda m, x: x * by


def default(by):
    def function(m, x, by=by):
        return x + by

    return function


class Holder:
    """A forward may read values through an object."""

    def __init__(self, by):
        self.by = by


def read_through_an_object(m, x):
    return x * m.holder.by + m.fc.weight[0]


# name -> a model for each index
DIFFERENT = {
    "partial": lambda index: Calls(partial(scaled, by=1.0 + index)),
    "closure": lambda index: Calls(closure(2.0 + index)),
    "default argument": lambda index: Calls(default(0.5 * index)),
    "numpy scalar": lambda index: Calls(lambda m, x: x * m.by, by=np.float64(index + 1)),
    "numpy float32": lambda index: Calls(lambda m, x: x * m.by, by=np.float32(index + 1.5)),
    "numpy array": lambda index: Calls(lambda m, x: x + torch.as_tensor(m.by), by=np.arange(4.0) * index),
    "unregistered tensor": lambda index: Calls(lambda m, x: x * m.by, by=torch.arange(4.0, dtype=D) + index),
    "unregistered tensors of other shapes": lambda index: Calls(
        lambda m, x: x * m.by, by=torch.full((1, 4) if index else (4,), index + 1.0, dtype=D)
    ),
    "object": lambda index: Calls(read_through_an_object, holder=Holder(index + 1)),
    "dropout rate": lambda index: Calls(lambda m, x: F.dropout(x, m.p), p=float(index % 2)),
    "slope": lambda index: Calls(lambda m, x: F.leaky_relu(x, m.p), p=0.1 * index),
    "axis": lambda index: Calls(lambda m, x: x.cumsum(m.axis), axis=index % 2),
    "size asked for": lambda index: Calls(lambda m, x: x * x.size(m.axis), axis=index % 2),
    "other sign of zero": lambda index: Calls(lambda m, x: x.exp() / m.by, by=-0.0 if index else 0.0),
    "string": lambda index: Calls(lambda m, x: F.gelu(x, approximate=m.kind), kind="tanh" if index else "none"),
    "method of an object": lambda index: Calls(types.MethodType(lambda self, m, x: x * self.by, Holder(index + 1))),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DIFFERENT)
def test_each_model_computes_with_its_own(name, backend):
    index = iter(range(3))
    models = made(lambda: DIFFERENT[name](next(index)), 3)
    check(models, torch.randn(5, 4, dtype=D), shared=True, backend=backend)


class Keeps(Calls):
    """Leaves a value in an attribute that it never reads."""

    def forward(self, x):
        self.hidden = self.fc(x)
        return self.hidden * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_forward_leaves_behind_is_in_unfused_models(backend):
    models = made(lambda: Keeps(None), 2)
    array = hocket.fuse(models, backend=backend)
    for _ in range(3):
        x = torch.randn(5, 4, dtype=D)
        array(x)
        for model, alone in zip(array.unfuse(), models, strict=True):
            alone(x)
            assert_close(model.hidden, alone.hidden.detach(), "hidden")
            assert not model.hidden.requires_grad
