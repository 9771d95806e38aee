"""Changes between two calls of a planned step: each call is as eager's."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hocket
from support.steps import update

ONE = hocket.Machine.of(cores=1)


@pytest.fixture(scope="module")
def warm() -> None:
    """Have torch do here what it does once in a process."""
    _count("item", 2)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("place", ["item", "attribute"])
@pytest.mark.parametrize("call", range(2, 8))
def test_hook_that_begins_to_count_while_the_step_is_looked_at(place, call):
    """The first recorded step makes the counter: it is new, and no name that was not looked at before.

    With a convolution, torch's own code runs for the first time then.
    """

    _count(place, call)


class Seen:
    """Holds a counter."""


def _count(place, call):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table, seen = {}, Seen()

    def count(_):
        if place == "item":
            table["calls"] = table.get("calls", 0) + 1
        else:
            seen.calls = getattr(seen, "calls", 0) + 1

    def step(x):
        return update(optimizer, model(x).pow(2).mean() + 0 * len(table))

    x = torch.randn(2, 2, 4, 4)
    with hocket.schedule(step, model, optimizer, guard=False, planner="serial", machine=ONE, cache=False) as fast:
        for n in range(30):
            if n == call:
                model[0].weight.register_hook(count)
            fast(x)
            assert (table.get("calls", 0) or getattr(seen, "calls", 0)) == max(0, n + 1 - call)


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_that_were_one_tensor_are_two_later(zeroed):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeroed)
            return loss

        return step, model, optimizer

    eager, model, _ = build()
    step, other, optimizer = build()
    x = torch.randn(3, 4)
    with hocket.schedule(step, other, optimizer, guard=False, planner="serial", machine=ONE, cache=False) as fast:
        for n in range(50):
            for each in (model, other):
                if n in (2, 40):
                    each[0].weight.grad = torch.ones(4, 4)
                    each[2].weight.grad = each[0].weight.grad
                if n == 20:
                    each[2].weight.grad = torch.ones(4, 4)
            assert torch.equal(eager(x), fast(x))
            for first, second in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(first, second)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ["dict", "tensor"])
def test_what_a_cached_function_has_returned_changes(kind, size):
    """Settings that are made once: they are written, and made anew."""

    def build():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        settings = functools.lru_cache(size)(lambda name: {"weight": 1.0} if kind == "dict" else torch.ones(()))

        def step(x):
            weight = settings("train")["weight"] if kind == "dict" else settings("train")
            return update(optimizer, (model(x) * weight).pow(2).mean())

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return step, model, optimizer, settings

    eager, _, _, first = build()
    step, model, optimizer, second = build()
    x = torch.randn(3, 4)
    with hocket.schedule(step, model, optimizer, guard=False, planner="serial", machine=ONE, cache=False) as fast:
        for n in range(36):
            for each in (first, second):
                if n == 26:
                    assert fast.verdict == "planned", fast.why
                    each("train").update(weight=0.5) if kind == "dict" else each("train").mul_(0.5)
                if n == 28:
                    each("others")
                if n == 30:
                    each.cache_clear()
            assert torch.equal(eager(x), fast(x)), n
            assert first.cache_info().currsize == second.cache_info().currsize
