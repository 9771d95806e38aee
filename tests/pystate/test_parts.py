"""A step in parts does what the step does, in the same order; where that is not certain, there are no parts.

Names are bound as in the step: in branches, loops, comprehensions, functions and classes. Whole loops that are divided:
tests/loops (draws, looks, parted).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.parted import in_parts, ways

WEIGHT = torch.ones(3)


def outcome(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, float]:
    """Return what a call returns or raises, what it prints, and where it leaves the generator."""
    random.seed(3)
    try:
        found: Any = call()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parts have to raise the same
        found = type(error), str(error)
    return found, capsys.readouterr().out, random.random()


def comprehends(x: torch.Tensor) -> Any:
    y = sum(p * x for p in (1, 2)).sum()
    z = [q for p in ([1], [2]) for q in p]
    for p in (3, 4):
        y = y + p
    print(y.item(), z, p)
    return p


def comprehends_only(x: torch.Tensor) -> Any:
    y = torch.stack([p * x for p in (1, 2)]).sum()
    if y is None:
        p = 1
    print(y.item())
    return p


def nests(x: torch.Tensor) -> Any:
    def inner() -> int:
        total = 3
        return total

    y = x.sum() + inner()
    if y is None:
        total = 1
    print(y.item())
    return total


def is_cut_short(x: torch.Tensor) -> Any:
    with contextlib.suppress(ZeroDivisionError):
        y = x.sum()
        n = 1 // int(x[0] * 0)
        z = y + 1
    print(y.item())
    return z, n


def enters(x: torch.Tensor) -> Any:
    with torch.no_grad() as mode, torch.enable_grad():
        y = x.sum()
    print(y.item(), mode)
    return y


def catches(x: torch.Tensor) -> Any:
    try:
        y = x.sum()
        n = 1 // int(x[0] * 0)
    except ZeroDivisionError as error:
        m = str(error)
    print(y.item(), m)
    return n


def assigns_within(x: torch.Tensor) -> Any:
    y = x.sum()
    flag = len(x) > 9 and (n := 5)
    print(y.item(), flag)
    return n


def loops(x: torch.Tensor) -> Any:
    for n in range(2):
        y = x.sum() + n
        if n == 1:
            last = n
    print(y.item(), n, last)
    while n < 3:
        n += 1
    return y, n


def loops_never(x: torch.Tensor) -> Any:
    y = x.sum()
    for n in range(len(x) - 3):
        y = y + n
    print(y.item())
    return n


def matches(x: torch.Tensor) -> Any:
    match x.tolist():
        case [first, *others]:
            y = x.sum() + first
        case _:
            y = x.sum()
    print(y.item(), first)
    return others


def deletes(x: torch.Tensor) -> Any:
    y, n = x.sum(), 1
    if len(x) > 2:
        del n
    print(y.item())
    return n


def makes_a_class(x: torch.Tensor) -> Any:
    class Holder:
        value = 4
        twice = value * 2

    y = (x * Holder.twice).sum()
    if y is None:
        value = 1
    print(y.item(), Holder.value)
    return value


def binds_twice(x: torch.Tensor) -> Any:
    source = iter([None, x])
    batch = next(source)
    if batch is None:
        batch = next(source)
    y = (batch * WEIGHT).sum()
    print(y.item())


def scaled(number: float) -> float:
    return number * random.random()


def draws_after_a_function_that_calls_one(x: torch.Tensor) -> Any:
    y = x * 2
    (scale,) = torch.utils._pytree.tree_map(scaled, [0.5])
    rate = random.random()
    z = y.mul(rate)
    print(z.sum().item(), scale)


def declares(x: torch.Tensor) -> Any:
    global WEIGHT
    note: str
    y = x * WEIGHT
    WEIGHT = WEIGHT + 0
    note = f"{y.sum().item()}"
    print(note)
    return [each + note for each in note]


def names_again(x: torch.Tensor) -> Any:
    y = sum(p.pow(2).sum() for p in (x, x))
    kept = []
    for held, p in zip((y, y), (x, x), strict=True):
        kept.append((held.item(), len(p)))
    n = [n for n in kept]  # noqa: C416
    print(n, kept)
    return {p: held for p, held in enumerate(n)}  # noqa: C416


def trained(x: torch.Tensor) -> torch.Tensor:
    weight = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (x * weight).sum().backward()
    optimizer.step()
    return weight.detach().sum()


def trains_in_its_return(x: torch.Tensor) -> Any:
    scale = random.random()
    return trained(x * scale)


def bound_perhaps(x: torch.Tensor) -> None:
    if len(x) > 5:
        z = x.sum()
    y = x.square().sum()
    if len(x) > 5:
        print(z)
    print(y)


def returns_between(x: torch.Tensor) -> Any:
    if len(x) > 5:
        return None
    print(x.sum())
    return 1


def shuffles(x: torch.Tensor) -> None:
    order = [0, 1, 2]
    random.shuffle(order)
    print(order, x[order].sum())


def looks_at_its_variables(x: torch.Tensor) -> None:
    x = x.square()
    print(sorted(locals()))


class Private:
    __rate = 2.0

    def step(self, x: torch.Tensor) -> None:
        y = x.mul(self.__rate)
        print(y.sum())


STEPS = [
    *(comprehends, comprehends_only, nests, is_cut_short, enters, catches, assigns_within, loops, loops_never),
    *(matches, deletes, makes_a_class, binds_twice, draws_after_a_function_that_calls_one, declares, names_again),
    *(trains_in_its_return, bound_perhaps, returns_between, shuffles, looks_at_its_variables, Private().step),
]
# Their names are those of a function or a class within, too, or no source tells what they do.
MAY_BE_WHOLE = [nests, makes_a_class, *STEPS[-4:]]


@pytest.mark.parametrize("step", STEPS)
def test_parts_one_after_the_other_are_the_step(step: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the step raises because a name is not bound."""
    x = torch.arange(1.0, 4.0)
    found = ways(step, x)
    capsys.readouterr()
    assert found or step in MAY_BE_WHOLE
    expected = outcome(lambda: step(x), capsys)
    for parts in found:
        assert outcome(lambda parts=parts: in_parts(parts, x), capsys) == expected  # type: ignore[misc]


def ends_early(x: torch.Tensor) -> Any:
    y = (x * WEIGHT).sum()
    if y > 5:
        return y.item(), "early"
    for each in x.tolist():
        if each < -1:
            return None
    z = y * 2
    print(z.item())
    return z


@pytest.mark.parametrize("x", [torch.ones(3), 2 * torch.ones(3), -2 * torch.ones(3)], ids=["whole", "first", "second"])
def test_a_middle_may_end_the_step(x: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    found = ways(ends_early, torch.ones(3))
    capsys.readouterr()
    assert found
    for parts in found:
        assert outcome(lambda parts=parts: in_parts(parts, x), capsys) == outcome(lambda: ends_early(x), capsys)  # type: ignore[misc]


def test_code_without_a_source_is_left_whole() -> None:
    space: dict[str, Any] = {}
    exec("def step(x):\n    y = x.square()\n    print(y)\n", space)
    assert ways(space["step"], torch.ones(2)) == []
