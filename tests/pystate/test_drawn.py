"""Numbers given to a step in place of draws: only to the step, and only while it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hocket
from hocket.arguments import packed, unpacked
from hocket.pystate import generator_places
from hocket.pystate.drawn import DrawnAhead, ways
from hocket.pystate.step_parts import is_end
from hocket.pystate.watch import PurityWatch


def drawing(step: Callable[..., Any], *args: Any) -> DrawnAhead:
    """The whole step, whose draws are listed."""
    watch = PurityWatch(step, ())
    for _ in range(3):
        watch.run(lambda batch: step(*unpacked(batch)[0]), packed(args, {}))
    found = ways(watch)[-1]
    assert isinstance(found, DrawnAhead)
    assert not found.is_over
    assert is_end(found.begin(packed(args, {}))[1])
    return found


def in_turn(parts: DrawnAhead, *args: Any) -> Any:
    own, kept = parts.begin(packed(args, {}))
    given, named = unpacked(own)
    return parts.end(packed(args, {}), kept, parts.middle(*given, **named))


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def test_another_thread_draws_for_itself() -> None:
    seen: list[float] = []

    def step(x: torch.Tensor) -> float:
        y = x.mul(random.random())
        seen.append(in_a_thread(random.Random(5).random))
        return y.sum().item()

    def step_beside(x: torch.Tensor) -> float:
        y = x.mul(random.random())
        seen.append(in_a_thread(random.random))
        return y.sum().item()

    in_turn(drawing(step, torch.ones(3)), torch.ones(3))
    assert len(set(seen)) == 1
    seen.clear()
    in_turn(drawing(step_beside, torch.ones(3)), torch.ones(3))
    assert len(set(seen)) == len(seen)


def test_a_function_that_the_step_keeps_draws_for_itself_later() -> None:
    kept: list[Any] = []

    def step(x: torch.Tensor) -> float:
        kept.append(random.random)
        return x.mul(random.random()).sum().item()

    parts = drawing(step, torch.ones(3))
    in_turn(parts, torch.ones(3))
    random.seed(4)
    found = kept[-1]()
    random.seed(4)
    assert found == random.random()


def test_no_object_is_looked_through_for_what_no_step_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look through all objects takes many times as long as a step."""
    looked: list[object] = []
    monkeypatch.setattr(generator_places, "_give_back", lambda *given: looked.append(given))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def rows() -> torch.Tensor:
        return torch.from_numpy(np.random.choice(6, 4, replace=False))  # noqa: NPY002

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch)[rows()].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False, machine=hocket.Machine.of(cores=1))
    for _ in range(30):
        fast(torch.randn(6, 4))
    assert fast.verdict == "planned", fast.why
    assert not looked
