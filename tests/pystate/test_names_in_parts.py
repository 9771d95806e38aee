"""Names of a step in parts are bound as in the step: in branches, loops, comprehensions, functions and classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hocket.pystate.executed import ExecutedCode
from hocket.pystate.parts import split
from support.parted import in_parts


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


def outcome_or_error(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    try:
        found: Any = call()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parts have to raise the same
        found = type(error), str(error)
    return found, capsys.readouterr().out


@pytest.mark.parametrize(
    "step",
    [
        *(comprehends, comprehends_only, nests, is_cut_short, enters, catches, assigns_within, loops, loops_never),
        *(matches, deletes, makes_a_class),
    ],
)
def test_names_are_bound_as_in_the_step(step: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the step raises because one is not."""
    x = torch.arange(1.0, 4.0)
    executed = ExecutedCode()
    with executed.watching(), contextlib.suppress(UnboundLocalError):
        step(x)
    found = split(step, executed.lines)
    capsys.readouterr()
    assert found or step in (nests, makes_a_class)  # whose names are those of a function or a class within, too
    expected = outcome_or_error(lambda: step(x), capsys)
    for parts in found:
        assert outcome_or_error(lambda parts=parts: in_parts(parts, x), capsys) == expected  # type: ignore[misc]
