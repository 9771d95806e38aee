"""Sinks are called once for each step, by plan or by eager, and never for a step that is only compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.autotune.verification import verify
from hocket.errors import InputError, StaleCaptureError


def _loop(
    every: int = 1, counts: bool = True
) -> tuple[Callable[[torch.Tensor], Any], nn.Module, torch.optim.Optimizer, list[Any]]:
    """A step that calls a sink in every step whose number `every` divides, and what the sink got."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    state = {"step": 0}
    show = hocket.sink(lambda number, loss: seen.append((number, loss)))

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        state["step"] += counts
        if state["step"] % every == 0:
            show(state["step"], loss.item())
        return loss.detach()

    return step, model, optimizer, seen


def test_a_step_that_is_captured_by_itself_calls_none() -> None:
    step, model, optimizer, seen = _loop()
    hocket.capture(step, model, optimizer, torch.randn(3, 4))
    assert seen == []


def test_a_stale_plan_calls_none_twice() -> None:
    step, model, optimizer, seen = _loop(counts=False)
    batch = torch.randn(3, 4)
    step(batch)
    captured = hocket.capture(step, model, optimizer, batch)

    def stale(_: Any) -> Any:
        raise StaleCaptureError("another branch")

    before = len(seen)
    found, _ = verify(captured, stale, [batch])
    assert found.bitwise
    assert len(seen) == before + 1


@pytest.mark.parametrize("numerics", ["bitwise", "close"])
@pytest.mark.parametrize("every", [1, 7])
def test_each_step_calls_its_sinks_once(numerics: str, every: int) -> None:
    step, model, optimizer, seen = _loop(every)
    plain_step, _, _, expected = _loop(every)
    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False, numerics=numerics)
    for _ in range(180):
        batch = torch.randn(3, 4)
        fast(batch)
        plain_step(batch)
    assert [number for number, _ in seen] == [number for number, _ in expected]
    if numerics == "bitwise":
        assert seen == expected


def test_the_main_job_calls_each_step_once() -> None:
    from hocket.trial import try_out

    step, model, optimizer, seen = _loop(every=3)
    job = hocket.Job(step, model, optimizer, [torch.randn(3, 4) for _ in range(4)], name="sinks")
    try_out(job, cache=False, runs=2)
    numbers = [number for number, _ in seen]
    assert len(numbers) > 3
    assert numbers == list(range(3, 3 * len(numbers) + 1, 3))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InputError, match="expected a function, got int"):
        hocket.sink(3)
