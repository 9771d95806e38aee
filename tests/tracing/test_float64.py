"""The step in float64: the step's own numbers and draws, nothing of it moved, within its limit of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same
from hocket.errors import CaptureError
from hocket.tracing import float64
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.float64 import IN_PARTS, float64_step
from hocket.tracing.program import Call
from hocket.tracing.saved_state import Saved
from support.refusals import fails
from support.steps import training_step, update


@dataclass
class Case:
    """A step that has run, and is captured."""

    step: Callable[[Any], Any]
    batch: tuple[torch.Tensor, torch.Tensor]
    captured: Captured


def case() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.25)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batch = (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))
    step = training_step(model, optimizer)
    step(batch)
    return Case(step, batch, capture_step(step, model, optimizer, batch, split=False))


def test_it_draws_what_the_step_draws_and_moves_nothing() -> None:
    found = case()
    before = Saved(found.captured.trace.places.again())
    random = torch.get_rng_state()
    left = float64_step(found.captured, found.batch)
    assert torch.equal(random, torch.get_rng_state())
    assert_same(list(before.values()), list(before.current()))
    loss = found.step(found.batch)
    assert left.result[0].dtype == torch.float64
    assert abs(left.result[0].item() - loss.item()) < 1e-5 * loss.item()
    for source, value in left.each():
        torch.testing.assert_close(source.get().detach().double(), value.double(), rtol=1e-3, atol=1e-5)


def test_it_keeps_no_value_beyond_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case()
    live: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(call: Call, values: dict[int, Any], *others: Any) -> None:
        nonlocal most
        run(call, values, *others)
        live.extend(weakref.ref(values[slot]) for slot in call.outs.values())
        most = max(most, sum(each() is not None for each in live))

    run = float64._run
    monkeypatch.setattr(float64, "_run", counted)
    float64_step(made.captured, made.batch)
    assert most < len(live) / 2


def test_values_that_lie_in_a_file_leave_the_same_bits() -> None:
    made = case()
    held = float64_step(made.captured, made.batch)
    with float64_step(made.captured, made.batch, limit_bytes=0) as out:
        outside = [
            value for _, value in out.places if isinstance(value, torch.Tensor) and not value.untyped_storage().nbytes()
        ]
        assert outside, "what is left lies in the file, too"
        for of in (held, out):
            for (_, first), (_, second) in zip(held.each(), of.each(), strict=True):
                assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
            for first, second in zip(held.result, of.result, strict=True):
                assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
        assert not any(value.untyped_storage().nbytes() for value in outside), "and goes out again"


def test_tensors_that_share_memory_may_be_read() -> None:
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return batch[0].sum() * batch[1].sum()

    x = torch.randn(3, 4)
    batch = [x, x.view(-1)]
    with float64_step(capture_step(step, [], [], batch), batch) as found:
        assert torch.equal(found.result[0], x.double().sum() * x.double().sum())


@pytest.mark.parametrize("strides", [(8, 1), (1, 3), (1, 8), (0, 1)])
def test_what_the_step_reads_keeps_its_strides(strides: tuple[int, int]) -> None:
    seen: list[tuple[int, ...]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        return (batch * batch).sum()

    batch = torch.randn(64).as_strided((3, 4), strides)
    captured = capture_step(step, [], [], batch)
    run = float64._run

    def noted(call: Any, values: Any, *others: Any) -> None:
        seen.extend(values[slot].stride() for slot in call.reads if slot == captured.inputs[0][0])
        run(call, values, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float64, "_run", noted)
        with float64_step(captured, batch) as found:
            assert torch.allclose(found.result[0], step(batch.double()))
    assert set(seen) == {strides if 0 not in strides else (4, 1)}


def test_tensors_that_share_memory_and_are_written_have_no_float64_step() -> None:
    base = torch.zeros(6)
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("first", base[:4])
    model.register_buffer("second", base[2:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.first.add_(1)
        return update(optimizer, model(x).sum() + model.second.sum())

    x = torch.ones(1, 2)
    step(x)
    captured = capture_step(step, model, optimizer, x)
    fails(CaptureError, "share memory", float64_step, captured, x)


aten = torch.ops.aten
OPTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = {
    # images, weight, and: stride, padding, dilation, whether transposed, output padding, groups
    "plain": ((7, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]),
    "strided groups": ((7, 4, 9, 8), (6, 2, 3, 3), [[2, 2], [1, 1], [1, 1], False, [0, 0], 2]),
    "dilated": ((7, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [0, 0], [2, 2], False, [0, 0], 1]),
    "transposed": ((7, 4, 9, 8), (4, 6, 3, 3), [[2, 2], [1, 1], [1, 1], True, [1, 1], 1]),
    "one dimension": ((7, 4, 9), (6, 4, 3), [[1], [1], [1], False, [0], 1]),
    "one image": ((1, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_make_the_whole(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, weight_shape, options = OPTIONS[name]
    if last and len(shape) != 4:
        pytest.skip("channels last is for images")
    torch.manual_seed(0)
    kind = torch.channels_last if last else torch.contiguous_format
    x, weight = torch.randn(shape).double().contiguous(memory_format=kind), torch.randn(weight_shape).double()
    bias = torch.randn(6).double()
    forward, backward = map(IN_PARTS.get, (aten.convolution.default, aten.convolution_backward.default))
    assert forward is not None
    assert backward is not None
    whole = aten.convolution.default(x, weight, bias, *options)
    gradient = torch.randn_like(whole)
    wanted = [
        aten.convolution_backward.default(gradient, x, weight, [6], *options, m)
        for m in ([True] * 3, [False, True, False])
    ]
    # Two images at a time, and one is left over.
    monkeypatch.setattr(float64, "MAX_COLUMNS_BYTES", 2 * 8 * weight[0, 0].numel() * x[0].numel())
    sizes: list[int] = []
    part = float64._parts
    monkeypatch.setattr(float64, "_parts", lambda *a: (found := part(*a), sizes.append(len(found)))[0])
    made = forward(x, weight, bias, *options)
    assert sizes == [1 if len(x) == 1 else 4]
    assert made.stride() == whole.stride()
    torch.testing.assert_close(made, whole, rtol=1e-13, atol=1e-13)
    for mask, expected in zip(([True] * 3, [False, True, False]), wanted, strict=True):
        for one, other in zip(backward(gradient, x, weight, [6], *options, mask), expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.stride() == other.stride()
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_dtypes_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "MAX_COLUMNS_BYTES", 1)
    assert float64._parts(torch.randn(5, 2, 4, 4), torch.randn(3, 2, 3, 3)) == [(0, 5)]
    assert len(float64._parts(torch.randn(5, 2, 4, 4).double(), torch.randn(3, 2, 3, 3).double())) == 5
