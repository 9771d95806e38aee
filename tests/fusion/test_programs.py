"""What a trace of a forward leaves as it was: counters, random generators, and tables that are kept for later."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

import hocket

pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")

CODE = """
{before}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        {branch}
        return {result}
"""
BRANCHES = {"symbolic": "pass", "recorded": "x = x * 1 if x.shape[0] > 1 else x"}  # torch.fx cannot follow the latter
COUNTER = "COUNT = 0\ndef counted():\n    global COUNT\n    COUNT += 1\n    return COUNT"
GENERATOR = "def numbers():\n    n = 0\n    while True:\n        n += 1\n        yield n\nNUMBERS = numbers()"
OUTSIDE = {
    "a generator of numpy": ("RANDOM = np.random.default_rng(0)", "self.linear(x) * float(RANDOM.normal())"),
    "a generator of Python": ("RANDOM = random.Random(0)", "self.linear(x) * RANDOM.random()"),
    "a generator of torch": (
        "RANDOM = torch.Generator().manual_seed(0)",
        "self.linear(x) + torch.randn(3, generator=RANDOM)",
    ),
    "an iterator": (GENERATOR, "self.linear(x) * next(NUMBERS)"),
    "a counter": (COUNTER, "self.linear(x) * counted()"),
    "a counter in a list": ("COUNT = [0]", "self.linear(x) * (COUNT.__setitem__(0, COUNT[0] + 1) or COUNT[0])"),
    "a counter of a class": (
        "class Of:\n    count = 0\ndef counted():\n    Of.count += 1\n    return Of.count",
        "self.linear(x) * counted()",
    ),
}


def models_of(outside: str, branch: str) -> list[nn.Module]:
    """Two models of a module of their own."""
    before, result = OUTSIDE[outside]
    names = {"torch": torch, "nn": nn, "np": np, "random": random, "__name__": "of_a_user"}
    exec(CODE.format(before=before, branch=BRANCHES[branch], result=result), names)
    torch.manual_seed(0)
    return [names["Model"]() for _ in range(2)]


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_forward_goes_on_with_what_it_finds_outside_of_the_models(outside, branch, backend):
    array, plain = hocket.fuse(models_of(outside, branch), shared=True, backend=backend), models_of(outside, branch)
    x = torch.randn(5, 3)
    for _ in range(4):
        out = array(x)
        for index, model in enumerate(plain):
            torch.testing.assert_close(out[index], model(x))


class Draws(nn.Linear):
    """Draws from everywhere."""

    def forward(self, x):
        random.random()
        np.random.random()  # noqa: NPY002
        return super().forward(x) * torch.rand(())


def test_what_draws_by_default_draws_what_it_would_have_drawn():
    array = hocket.fuse([Draws(3, 3), Draws(3, 3)], shared=True)
    drawn = []
    for models in ([array], array.unfuse()):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        for model in models:
            model(torch.ones(5, 3))
        drawn.append((float(torch.rand(())), random.random(), np.random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


@functools.lru_cache
def table(length, device):
    return torch.arange(length, device=device).float()


class ByTable(nn.Module):
    """Recorded, for its branch; keeps a table for all models."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * table(x.shape[1], x.device) if x.shape[0] > 1 else x


def test_a_table_that_a_forward_keeps_has_its_data():
    table.cache_clear()
    models = [ByTable(), ByTable()]
    array = hocket.fuse(models, shared=True, strict=True)
    x = torch.randn(5, 3)
    out = array(x)
    assert type(table(3, x.device)) is torch.Tensor
    torch.testing.assert_close(out[1], models[1](x))
    assert array._calls.programs.made(), "and it fuses"


class Doubled(nn.Module):
    """What is around a forward is part of a model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def __call__(self, x):
        return 2 * super().__call__(x)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("make", [Doubled, lambda: nn.Sequential(Doubled())])
def test_a_call_of_its_own_is_followed(make):
    models = [make(), make()]
    array = hocket.fuse(models, shared=True, strict=True, backend="rule")
    x = torch.randn(5, 3)
    torch.testing.assert_close(array(x)[1], models[1](x))
