"""A fused update as several ops on some parameters each: which, how large, and bitwise the same."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.captured import Captured, capture_step, relowered
from hocket.tracing.lowering import updates
from hocket.tracing.saved_state import Saved
from hocket.tracing.state import inventory
from hocket.tracing.variants import rewritten

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def fused(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, Any]:
    """A step with a fused update, captured as one op for each group; a chunk may be of any size."""
    monkeypatch.setattr(updates, "MIN_CHUNK_BYTES", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    made = OPTIMIZERS[optimizer](model.parameters())
    batch = torch.randn(4, 8)

    def step(given: Any) -> torch.Tensor:
        made.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        made.step()
        return loss

    step(batch)
    form = rewritten(step, "+fused-update", inventory(model, made))
    return capture_step(form, model, made, batch, split=False), batch


def left_by(captured: Captured, batch: Any) -> list[Any]:
    """What a step leaves in all places; the state is put back."""
    before = Saved(captured.trace.places, captured.written())
    with closing(ThreadLanes(captured, Plan((Lane("main", captured.graph.order, width=1),)))) as executor:
        executor(batch)
    after = [(name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in before.current()]
    before.restore()
    return after


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_bitwise_the_same(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, batch = fused(optimizer, monkeypatch)
    divided = relowered(whole, split=False, update_chunks=3)
    ops = [op for op in divided.graph.ops if "_fused_" in op.target]
    assert len(ops) == 3
    written = [name for op in ops for name in op.writes]
    assert len(set(written)) == len(written), "no two of them write the same"
    for (name, one), (_, other) in zip(left_by(whole, batch), left_by(divided, batch), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name


def test_chunks_have_about_as_many_bytes_and_wait_for_their_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = fused("sgd", monkeypatch)
    divided = relowered(whole, split=False, update_chunks=2)
    first, second = (op for op in divided.graph.ops if "_fused_" in op.target)
    parameters = {entry.name: entry.get().numel() for entry in whole.trace.places.parameters}
    sizes = [sum(parameters.get(name, 0) for name in op.writes) for op in (first, second)]
    assert sizes == [8 * 16 + 16, 16 * 16 + 16 + 16 * 4 + 4]
    assert not {name for name in second.reads if name.startswith("0.")}


def test_small_updates_stay_whole() -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole, _ = fused("sgd", patch)
    assert relowered(whole, split=False, update_chunks=3).graph.fingerprint == whole.graph.fingerprint
