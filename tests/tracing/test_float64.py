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
from hocket.tracing.float64 import float64_step
from hocket.tracing.program import Call
from hocket.tracing.saved_state import Saved
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


def test_tensors_that_share_memory_have_no_float64_step() -> None:
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
    with pytest.raises(CaptureError, match="share memory"):
        float64_step(captured, x)
