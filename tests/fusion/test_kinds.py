"""Ever new kinds of calls: those like each other run by one plan, and what is remembered has a bound."""

from __future__ import annotations

import copy
import functools
from types import CodeType, ModuleType

import numpy as np
import pytest
import torch
from tests.fusion.losses import GO, Runs
from tests.fusion.oracle import assert_each, made
from tests.fusion.prefer import ALL, prefer, winners
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import mse_loss

import hocket
from hocket.fusion import calls, programs

pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


D = torch.float64
LENGTHS = range(4, 15)
Y = torch.tensor([0, 1, 1, 0, 1])


class Words(nn.Module):
    """Sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


def batch(length: int) -> torch.Tensor:
    return torch.randn(5, length, 3, dtype=D)


@pytest.mark.parametrize("way", [ALL, "1 at a time"])
def test_forwards_of_many_lengths_go_as_most_of_them_did(way, monkeypatch):
    prefer(monkeypatch, forward=way)
    models = made(Words, 4)
    array = hocket.fuse(copy.deepcopy(models), shared=True)
    for length in LENGTHS:
        x = batch(length)
        for _ in range(2):
            assert_each(array(x), [model(x) for model in models])
    assert winners(array) == [way]
    for length in (3, 60):  # LIKE times as many numbers may have another plan that is the fastest
        array(batch(length))
    assert winners(array) == [way] * 2
    with torch.no_grad():
        for _ in range(2):
            array(batch(4))
    assert winners(array) == [way] * 3, "without gradients it is another matter"


@pytest.mark.parametrize("way", [ALL, GO])
def test_losses_of_many_lengths_go_as_most_of_them_did(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Words, 4), shared=True)
    for length in LENGTHS:
        runs.step(F.cross_entropy, batch(length), (Y,))
    assert winners(runs.array) == [way]


def test_models_that_come_and_differ_in_more_than_values_have_turns_anew(monkeypatch):
    prefer(monkeypatch, GO)
    array = hocket.fuse(made(Words, 2), shared=True)
    for length in LENGTHS:
        array(batch(length))
    before = len(array.choices)
    array.refill(0, made(Words, 3)[2])
    array(batch(3))
    assert len(array.choices) == before
    other = made(Words, 3)[2]
    other.note = object()
    array.refill(0, other)
    for _ in range(2):
        array(batch(3))
    assert len(array.choices) == before + 1


KEPT = 2


class Scaled(nn.Linear):
    """A layer whose output is scaled by what it is handed."""

    def forward(self, x, scale):
        return super().forward(x) * scale


class ScaledByArray(Scaled):
    """The scale is an array, which becomes a tensor in the forward."""

    def forward(self, x, scale):
        return super().forward(x, torch.from_numpy(scale))


@functools.lru_cache(8)
def table(_, scale):
    return torch.full((2,), scale)


class ScaledByTable(Scaled):
    """The scale is looked up, for each model in a table of its own that outlives the call."""

    def forward(self, x, scale):
        return super().forward(x, table(self.number, scale))


def as_number(value):
    return value


def as_array(value):
    return np.full(2, value, dtype=np.float32)


def num_entries(root):
    """The entries of all containers that are reached from an object."""
    seen, todo, found = set(), [root], 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, CodeType)):
            continue
        seen.add(id(value))
        inner = []
        if isinstance(value, dict) and "__builtins__" not in value:
            inner = [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            inner = list(value)
        elif isinstance(value, functools.partial):
            inner = [value.func, value.args, value.keywords]
        found += len(inner)
        todo += inner if hasattr(value, "__len__") else [*inner, getattr(value, "__dict__", None)]
    return found


@pytest.mark.parametrize(
    ("kind", "content", "lasts"),
    [(Scaled, as_number, 1), (Scaled, as_number, 2), (ScaledByArray, as_array, 1), (ScaledByTable, as_number, 3)],
)
def test_contents_that_do_not_return_are_forgotten(kind, content, lasts, monkeypatch):
    for module in (programs, calls):
        monkeypatch.setattr(module, "MAX_PROGRAMS", KEPT)
    models = [kind(3, 2) for _ in range(2)]
    for number, model in enumerate(models):
        model.number = number
    array = hocket.fuse(models, shared=True)
    x, y, entries = torch.ones(4, 3), torch.zeros(4, 2), []
    for number in range(1, 33):
        for _ in range(lasts):
            array.loss(mse_loss, array(x, content(1.0 / number)), y).sum().backward()
            array.zero_grad()
        entries.append(num_entries(array))
    assert max(entries[-8:]) <= max(entries[:-8])


def test_numbers_that_are_others_in_each_call_are_not_recorded_for_good():
    models = made(lambda: Scaled(4, 2), 2)
    array, x = hocket.fuse(models, shared=True), torch.randn(5, 4, dtype=torch.float64)

    def call(factors):
        for factor in factors:
            assert_each(array(x, factor), [model(x, factor) for model in models])

    call(float(number % 8) for number in range(40))
    assert "ops" in array.report(), "those that come again"
    with pytest.warns(UserWarning, match="a number among its arguments changes.*hand it over as a tensor"):
        call(0.5 + number for number in range(30))
    assert "one by one: a number" in array.report()
    call([2.0])
