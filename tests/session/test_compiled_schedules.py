"""`torch.compile` of a schedule, or of a function that calls one: the schedule runs as it stands, without a warning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from support.steps import update

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore:The .grad")


def _train(wrapped: Callable[[Any], Callable[[torch.Tensor], Any]], num_steps: int = 30) -> tuple[list[Any], Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, model(batch).square().sum())

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False)
    run = wrapped(fast)
    losses = [run(torch.full((2, 4), 0.1 * number)).item() for number in range(num_steps)]
    return losses, fast


@pytest.mark.parametrize("backend", ["eager", "hocket"])
def test_a_compiled_schedule_is_the_schedule(backend: str) -> None:
    expected, _ = _train(lambda fast: fast)
    losses, fast = _train(lambda fast: torch.compile(fast, backend=backend))
    assert losses == expected
    assert fast.verdict == "planned"


def test_a_compiled_function_may_call_a_schedule() -> None:
    expected, _ = _train(lambda fast: lambda batch: fast(batch * 2) + 1)
    losses, fast = _train(lambda fast: torch.compile(lambda batch: fast(batch * 2) + 1, backend="eager"))
    assert losses == expected
    assert fast.verdict == "planned"


def test_fullgraph_says_that_a_schedule_breaks_the_graph() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        _train(lambda fast: torch.compile(lambda batch: fast(batch * 2) + 1, backend="eager", fullgraph=True))
