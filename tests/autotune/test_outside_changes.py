"""Changes between two calls of a planned step: each call is as eager's."""

import functools

import pytest
import torch
from torch import nn

import hocket
from support.steps import update
from support.twins import Program, ran

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
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeroed)
            return loss

        def between(number):
            if number in (2, 40):
                model[0].weight.grad = model[2].weight.grad = torch.ones(4, 4)
            if number == 20:
                model[2].weight.grad = torch.ones(4, 4)

        return Program(step, model, optimizer, between, lambda: list(model.parameters()))

    ran(make, lambda number: torch.ones(3, 4), 50, planner="serial")


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ["dict", "tensor"])
def test_what_a_cached_function_has_returned_changes(kind, size):
    """Settings that are made once: they are written, and made anew."""

    def make():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = functools.lru_cache(size)(lambda name: {"weight": 1.0} if kind == "dict" else torch.ones(()))

        def step(x):
            weight = settings("train")["weight"] if kind == "dict" else settings("train")
            return update(optimizer, (model(x) * weight).pow(2).mean())

        def between(number):
            if number == 26:
                settings("train").update(weight=0.5) if kind == "dict" else settings("train").mul_(0.5)
            if number == 28:
                settings("others")
            if number == 30:
                settings.cache_clear()

        return Program(step, model, optimizer, between, lambda: settings.cache_info().currsize)

    for num_calls in (26, 36):
        fast = ran(make, lambda number: torch.randn(3, 4), num_calls, planner="serial")
        assert num_calls > 26 or fast.verdict == "planned", fast.why
