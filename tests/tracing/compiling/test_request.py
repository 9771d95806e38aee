"""All of a step is compiled but updates by fused kernels, which stay torch's and come last."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hocket.autotune.forms import rewritten
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.request import request_of, with_told_views
from hocket.tracing.program import Call, Slot
from hocket.tracing.state import inventory
from hocket.tracing.variants import compiled_from
from support.refusals import fails
from tracing.compiling.test_compiled import views

MODEL = nn.Linear(4, 2)


def captured(*updates: Callable[[], torch.optim.Optimizer]) -> Captured:
    """A step that makes a loss, a backward and an update for each of these optimizers."""
    torch.manual_seed(0)
    optimizers = [make() for make in updates]

    def step(batch: Any) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = MODEL(batch).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    places = inventory(MODEL, optimizers)
    form = compiled_from("+compiled", places)[0]
    step(torch.randn(3, 4))
    plain = capture_step(step, MODEL, optimizers, torch.randn(3, 4), split=False)
    return rewritten(plain, form) if form else plain


def adam(**options: Any) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.Adam(MODEL.parameters(), lr=0.1, **options)


def test_a_fused_update_follows_what_is_compiled() -> None:
    document = request_of(captured(adam()), threads=2).document
    (update,) = document["updates"]
    assert update["op"] == "aten._fused_adam_.default"
    assert not any("_fused_" in call["op"] for call in document["calls"])
    gradients = {each["value"] for each in update["args"][1]}
    assert gradients <= {slot for slot, *_ in document["outputs"]}


def test_an_update_alone_is_not_compiled() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1, fused=True)
    MODEL(torch.randn(3, 4)).sum().backward()

    def step(batch: Any) -> None:
        optimizer.step()

    plain = capture_step(step, MODEL, optimizer, None, split=False)
    fails(CaptureError, "there is nothing to compile", request_of, plain, threads=2)


def test_an_update_without_fused_kernels_is_compiled() -> None:
    document = request_of(captured(adam(foreach=True)), threads=2).document
    assert not document["updates"]
    assert any("addcdiv" in call["op"] for call in document["calls"])


def test_what_reads_what_an_update_wrote_is_refused() -> None:
    """A second forward: it would have to wait for the first update, which comes after all that is compiled."""
    fails(CaptureError, r"comes after an update by aten\._fused_adam_", request_of, captured(adam(), adam()), threads=2)


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


def looked_at(batch: list[torch.Tensor], step: Callable[[Any], Any] = views) -> Captured:
    step(batch)
    return capture_step(step, [], [], batch, split=False)


def shared_batch() -> list[torch.Tensor]:
    x = torch.randn(3, 4)
    return [x, x.view(-1), torch.randn(4, 4)]


def test_views_are_left_by_their_base() -> None:
    form = looked_at(shared_batch())
    document = request_of(form, threads=2).document
    assert [size for _, size, *_ in document["outputs"]] == [[3, 4], []]
    assert sorted(call["op"].split(".")[1] for call in document["views"]) == ["split", "t", "view"]
    remade = {slot for call in document["views"] for _, slot in call["outs"]}
    assert remade.isdisjoint(slot for slot, *_ in document["outputs"])


def test_views_of_what_is_reshaped_in_place_are_refused() -> None:
    def reshaping(batch: Any) -> Any:
        hidden = torch.mm(batch[0], batch[2]).relu()
        transposed = hidden.t()
        hidden.unsqueeze_(0)
        return transposed, hidden

    with pytest.raises(CaptureError, match="what the step leaves shares memory"):
        request_of(looked_at(shared_batch(), reshaping), threads=2)


def test_tensors_that_share_memory_may_be_read_but_not_written() -> None:
    def writing(batch: Any) -> torch.Tensor:
        batch[1].add_(1.0)
        return batch[0].sum()

    with pytest.raises(CaptureError, match="share memory, and one of them is written"):
        request_of(looked_at(shared_batch(), writing), threads=2)
