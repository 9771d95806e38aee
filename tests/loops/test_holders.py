"""A counter, a random draw or an iterator in any place: the step is called once a call, and ends as eager."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hocket
from loops import holders
from loops.loop import Loop
from loops.runner import compared

STEPS = 26
MODES = {"plan": {"guard": False}, "default": {}, "close": {"guard": False, "numerics": "close"}}
ALL = {**holders.HOLDERS, **holders.NUMBERS}
USES = {
    "counter": (ALL, holders.REFUSED_COUNTERS),
    "draw": (holders.HOLDERS, holders.REFUSED_DRAWS),
    "iterator": (holders.HOLDERS, set(holders.HOLDERS)),
}
# Places that one step uses, which is recorded once for all of them, or in the draws of each branch anew.
TOGETHER = {"counter": 12, "draw": 30, "iterator": 1}


def _cases() -> Iterator[Any]:
    """Every holder of every use in every mode; by plan in the quick tests, alone only where it keeps the step eager."""
    for use, (table, refused) in USES.items():
        followed = [name for name in table if name not in refused]
        for first in range(count := -(-len(followed) // TOGETHER[use])):
            yield pytest.param(use, followed[first::count], "plan", False, id=f"{use}-{first}")
        for number, name in enumerate(table):
            for mode in MODES:
                quick = mode == "plan" and name in refused and (name in holders.NUMBERS or number % 3 == 0)
                counted = not quick or number % 4 == 0  # which takes longer than a call
                marks = () if quick else pytest.mark.slow
                yield pytest.param(use, [name], mode, counted, marks=marks, id=f"{use}-{name}-{mode}".replace(" ", "_"))


def _first(use: str) -> Any:
    return {"counter": 0, "draw": random.Random(3), "iterator": iter([0.1 * n for n in range(500)])}[use]


def _loop(use: str, names: list[str]) -> Loop:
    places = [ALL[name](_first(use)) for name in names]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch).square().mean()
        for read, write in places:
            if use == "counter":
                write(read() + 1)
            elif use == "draw":
                loss = loss * (0.5 if read().random() < 0.3 else 1.0)
            else:
                loss = loss * next(read())
        loss.backward()
        if use != "counter" or places[0][0]() % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def state():
        left = {name: read() for name, (read, _) in zip(names, places, strict=True)}
        return {name: next(held) for name, held in left.items()} if use == "iterator" else left

    return Loop(step, model, optimizer, [torch.randn(3, 4) for _ in range(5)], state)


@pytest.mark.parametrize(("use", "names", "mode", "counted"), list(_cases()))
def test_a_place_that_holds_state_ends_as_eager_leaves_it(use, names, mode, counted):
    """State is read at the end only, since reading some places writes them."""
    options = {"cache": False, "machine": hocket.Machine.of(cores=1), **MODES[mode]}
    build = functools.partial(_loop, use, names)
    ((verdict, why),) = compared(build, options, steps=STEPS, counted=counted, marked=0)
    assert verdict == "planned" or len(names) == 1 or use != "counter", why
