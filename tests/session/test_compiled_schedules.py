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


def _with_a_compiled_part(first: int, schedules: bool, function: Any, numerics: str = "bitwise") -> tuple[Any, Any]:
    """Train with a function in the loss from step `first` on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(batch: torch.Tensor, number: int) -> torch.Tensor:
        out = model(batch)
        return update(optimizer, (function(out) if number >= first else out).square().mean())

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False, numerics=numerics) if schedules else step
    return [fast(torch.randn(4, 6), min(number, first)).item() for number in range(40)], fast


def _in_a_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -99, nn.functional.gelu, nn.functional.softplus, (x,))


def _in_a_map(x: torch.Tensor) -> torch.Tensor:
    return torch._higher_order_ops.map(lambda row, y: {"a": row.sin() + y}, x, torch.ones(6))["a"]


def _in_a_loop(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = torch.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x.detach()))
    return x + found[1]


def _compiled(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).softmax(-1).log()


@pytest.mark.parametrize("first", [0, 3], ids=["from the start", "first in the recorded step"])
@pytest.mark.parametrize(
    ("function", "planned"),
    [
        (_in_a_cond, True),
        (_in_a_map, True),
        (_in_a_loop, False),
        (torch.compile(_compiled, backend="eager", fullgraph=True), True),
    ],
    ids=["cond", "map", "while_loop", "eager"],
)
def test_a_step_calls_what_is_compiled(first: int, function: Any, planned: bool) -> None:
    losses, fast = _with_a_compiled_part(first, True, function)
    assert losses == _with_a_compiled_part(first, False, function)[0]
    assert (fast.verdict == "planned") == planned, fast.why
    assert planned or "an op that calls functions" in fast.why


def test_code_of_inductor_is_planned_within_rounding_only() -> None:
    compiled = torch.compile(_compiled, backend="inductor")
    losses, fast = _with_a_compiled_part(0, True, compiled)
    assert losses == _with_a_compiled_part(0, False, compiled)[0]
    assert fast.verdict == "eager"
    assert "torch.compile has made by 'inductor' at test_compiled_schedules.py" in fast.why
    assert _with_a_compiled_part(0, True, compiled, "rounding")[1].verdict == "planned"
