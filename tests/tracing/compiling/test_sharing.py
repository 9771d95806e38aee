"""Ops that share memory and do not say so: what is written behind them is not lost, and unknown ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hocket.errors import CaptureError
from hocket.tracing.compiling.request import with_told_views
from hocket.tracing.program import Call, Slot

aten = torch.ops.aten
GATES, MOVED, LEFT, RIGHT, OTHER = range(5)
# One tensor in two halves, and others.
MEMORY: Mapping[int, int] = {GATES: 0, LEFT: 0, RIGHT: 0, MOVED: 1, OTHER: 2}

SPLIT = Call(aten.unsafe_split.Tensor, (Slot(GATES), 2, 1), {}, {0: LEFT, 1: RIGHT})
ADD = Call(aten.add_.Tensor, (Slot(GATES), Slot(MOVED)), {}, {})
SIGMOID = Call(aten.sigmoid_.default, (Slot(LEFT),), {}, {})
TANH = Call(aten.tanh_.default, (Slot(RIGHT),), {}, {})


def run(calls: list[Call]) -> torch.Tensor:
    """Contents of both halves, where a split makes tensors of their own (as the compiler believes)."""
    torch.manual_seed(0)
    values: dict[int, Any] = {GATES: torch.randn(2, 4), MOVED: torch.randn(2, 4)}
    for call in calls:
        args = [values[each.index] if isinstance(each, Slot) else each for each in call.args]
        result = call.func(*args)
        if call.func is SPLIT.func:
            result = [part.clone() for part in result]
        for position, slot in call.outs.items():
            values[slot] = result if position is None else result[position]
    return torch.cat([values[LEFT], values[RIGHT]], 1)


def test_a_split_is_made_when_its_parts_are_used() -> None:
    """A captured step has it right behind what makes its base."""
    calls = [SPLIT, ADD, SIGMOID, TANH]
    told = with_told_views(calls, MEMORY, kept=[])
    assert told == [ADD, SPLIT, SIGMOID, TANH]
    expected = run([replaced(SPLIT), ADD, SIGMOID, TANH])
    assert torch.equal(run(told), expected)
    assert not torch.equal(run(calls), expected), "as it stands the addition would be lost"


def replaced(call: Call) -> Call:
    return Call(aten.split.Tensor, call.args, call.kwargs, call.outs)


READ_WHOLE = Call(aten.sum.default, (Slot(GATES),), {}, {None: OTHER})


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([SPLIT, ADD, SIGMOID, READ_WHOLE], []),  # the whole is read behind a write of a part
        ([SPLIT, SIGMOID, ADD, TANH], []),  # the whole is written behind one
        ([SPLIT, ADD, SIGMOID, TANH], [GATES]),  # the step leaves the whole
        ([SPLIT, ADD], []),  # no part is used
    ],
)
def test_a_split_whose_whole_is_used_is_a_view(calls: list[Call], kept: list[int]) -> None:
    assert with_told_views(calls, MEMORY, kept) == [replaced(SPLIT), *calls[1:]]


def test_a_view_of_a_part_is_a_part() -> None:
    memory = {**MEMORY, OTHER: 0}
    turned = Call(aten.t.default, (Slot(LEFT),), {}, {None: OTHER})
    written = Call(aten.sigmoid_.default, (Slot(OTHER),), {}, {})
    assert with_told_views([SPLIT, ADD, turned, written], memory, kept=[]) == [ADD, SPLIT, turned, written]


def test_an_unsafe_view_is_a_view() -> None:
    shape = Call(aten._unsafe_view.default, (Slot(GATES), [8]), {}, {None: LEFT})
    (told,) = with_told_views([shape], MEMORY, kept=[])
    assert told.func is aten.view.default


def test_another_op_that_shares_memory_in_silence_is_refused() -> None:
    same = Call(aten.relu.default, (Slot(GATES),), {}, {None: LEFT})
    with pytest.raises(CaptureError, match=r"aten.relu.default returns memory that it is given, and does not say so"):
        with_told_views([same], MEMORY, kept=[])
