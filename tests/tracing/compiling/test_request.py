"""All of a step is compiled but updates by fused kernels, which stay torch's and come last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.autotune.rewriting import rewritten
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.request import request_of
from hocket.tracing.state import inventory
from hocket.tracing.variants import compiled_from

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


def test_an_update_without_fused_kernels_is_compiled() -> None:
    document = request_of(captured(adam(foreach=True)), threads=2).document
    assert not document["updates"]
    assert any("addcdiv" in call["op"] for call in document["calls"])


def test_what_reads_what_an_update_wrote_is_refused() -> None:
    """A second forward: it would have to wait for the first update, which comes after all that is compiled."""
    with pytest.raises(CaptureError, match=r"comes after an update by aten\._fused_adam_"):
        request_of(captured(adam(), adam()), threads=2)
