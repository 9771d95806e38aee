"""Calls whose content is another one at each step: an array of models remembers a bounded number of them."""

from __future__ import annotations

import functools
from types import CodeType, ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket
from hocket.fusion import calls, programs

pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")

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
