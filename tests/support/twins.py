"""A step that is scheduled beside its eager twin: the same results call by call, and a graph of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import hocket

# Calls that a variant is watched, recorded and verified in, those of the gradient's two forms included, and some more.
CALLS = 14


@dataclass
class Program:
    """A training step with what it trains.

    Attributes:
        between: called before each call, with its number.
        state: what else has to agree after each call.
        raises: what a call may raise; it has to be raised by both.
    """

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    between: Callable[[int], Any] = lambda number: None
    state: Callable[[], Any] = tuple
    raises: tuple[type[BaseException], ...] = ()


def ran(
    make: Callable[[], Program], batch: Callable[[int], Any], num_calls: int = CALLS, **options: Any
) -> hocket.Schedule:
    """Call the scheduled step and its twin. They must agree bit for bit. `batch` gives a tuple of arguments, or one."""
    eager, program = made(make), made(make)
    machine = hocket.Machine.of(cores=1)
    fast = hocket.schedule(
        program.step,
        program.model,
        program.optimizer,
        **{"guard": False, "cache": False, "machine": machine, **options},
    )
    for number in range(num_calls):
        found = []
        for one, step in ((eager, eager.step), (program, fast)):
            one.between(number)
            torch.manual_seed(number)
            random.seed(number)
            given = batch(number)
            try:
                result = step(*given) if type(given) is tuple else step(given)
            except one.raises as error:
                result = type(error), str(error)
            found.append(tree_leaves((result, one.state())))
        assert len(found[0]) == len(found[1]), f"call {number}: {found}"
        assert all(map(_are_same, *found)), f"call {number}: {found}"
    assert all(map(_are_same, eager.model.parameters(), program.model.parameters()))
    return fast


def captured(
    make: Callable[[], Program], batch: Callable[[int], Any], num_calls: int = CALLS, **options: Any
) -> hocket.Schedule:
    """As `ran`, and the step must be a graph at the end."""
    fast = ran(make, batch, num_calls, **options)
    assert fast._pool.current.captured is not None, fast.why
    return fast


def made(make: Callable[[], Program]) -> Program:
    torch.manual_seed(0)
    return make()


def _are_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
    return type(first) is type(second) and first == second
