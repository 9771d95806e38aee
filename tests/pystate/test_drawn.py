"""Numbers given to a step in place of draws: only to the step, and only while it runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hocket.arguments import packed, unpacked
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
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def draws(x: torch.Tensor) -> Any:
    y = x.mul(random.random())
    return y.sum().item(), random.randint(0, 100), np.random.normal(size=2).tolist()  # noqa: NPY002


def test_a_step_gets_the_numbers_that_it_would_draw() -> None:
    x = torch.ones(3)
    parts = drawing(draws, x)
    for _ in range(3):
        state, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        found = in_turn(parts, x)
        after = random.random()
        random.setstate(state)
        np.random.set_state(of_numpy)  # noqa: NPY002
        assert draws(x) == found
        assert random.random() == after


def test_functions_are_back_when_the_step_ends_also_when_it_raises() -> None:
    before = random.random, random.randint, np.random.normal

    def step(x: torch.Tensor, raises: bool = False) -> float:
        y = x.mul(random.random())
        if raises:
            raise KeyError("mine")
        return y.sum().item() * random.random()

    parts = drawing(step, torch.ones(3))
    state = random.getstate()
    own, _ = parts.begin(packed((torch.ones(3), True), {}))
    given, named = unpacked(own)
    with pytest.raises(KeyError, match="mine"):
        parts.middle(*given, **named)
    parts.raised()
    after = random.getstate()
    random.setstate(state)
    random.random()
    assert random.getstate() == after
    assert (random.random, random.randint, np.random.normal) == before


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


def test_other_draws_are_the_steps_own_and_are_said() -> None:
    bound = [1.0]

    def step(x: torch.Tensor) -> float:
        return x.mul(random.random()).sum().item() + random.uniform(0, bound[0])

    parts = drawing(step, torch.ones(3))
    in_turn(parts, torch.ones(3))
    assert not parts.was_left
    bound[0] = 2.0
    state = random.getstate()
    found = in_turn(parts, torch.ones(3))
    assert parts.was_left
    assert parts.anew()
    after = random.getstate()
    random.setstate(state)
    assert step(torch.ones(3)) == found
    assert random.getstate() == after
