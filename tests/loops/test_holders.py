"""A counter, a random draw or an iterator in any place: the step is called once a call, and ends as eager."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hocket
from loops import holders

STEPS = 26
MODES = {"plan": {"guard": False}, "default": {}, "close": {"guard": False, "numerics": "close"}}


def _cases() -> Iterator[Any]:
    """Every holder of every use once with a plan, in the quick tests one use of each."""
    uses = {"counter": {**holders.HOLDERS, **holders.NUMBERS}, "draw": holders.HOLDERS, "iterator": holders.HOLDERS}
    for use, table in uses.items():
        for number, name in enumerate(table):
            for place, mode in enumerate(MODES):
                quick = mode == "plan" and (number % 3 == list(uses).index(use) or name in holders.NUMBERS)
                marks = () if quick and place == 0 else (pytest.mark.slow,)
                counted = not quick or number % 4 == 0  # which takes longer than a call
                yield pytest.param(use, name, mode, counted, marks=marks, id=f"{use}-{name}-{mode}".replace(" ", "_"))


def _first(use: str) -> Any:
    return {"counter": 0, "draw": random.Random(3), "iterator": iter([0.1 * n for n in range(500)])}[use]


def _ran(
    use: str, make: Callable[[Any], holders.Made], options: dict[str, Any] | None, counted: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    read, write = make(_first(use))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(3, 4) for _ in range(5)]

    def step(batch):
        loss = model(batch).square().mean()
        if use == "counter":
            write(read() + 1)
        elif use == "draw":
            loss = loss * (0.5 if read().random() < 0.3 else 1.0)
        else:
            loss = loss * next(read())
        loss.backward()
        if use != "counter" or read() % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += frame.f_code is step.__code__

    one_core = hocket.Machine.of(cores=1)
    run = step if options is None else hocket.schedule(step, model, optimizer, cache=False, machine=one_core, **options)
    losses, before = [], sys.gettrace()
    for n in range(STEPS):
        sys.settrace(count if counted else before)
        try:
            losses.append(float(run(batches[n % 5])))
        finally:
            sys.settrace(before)
    if options is not None:
        run.close()
    left = read()
    state = left.getstate() if use == "draw" else next(left) if use == "iterator" else left
    return {"losses": losses, "weight": model.weight.tolist(), "state": state, "calls": calls}


@pytest.mark.parametrize(("use", "name", "mode", "counted"), list(_cases()))
def test_a_place_that_holds_state_ends_as_eager_leaves_it(use, name, mode, counted):
    make = {**holders.HOLDERS, **holders.NUMBERS}[name]
    eager, scheduled = _ran(use, make, None, counted), _ran(use, make, MODES[mode], counted)
    assert scheduled.pop("calls") <= eager.pop("calls")
    assert scheduled == eager
