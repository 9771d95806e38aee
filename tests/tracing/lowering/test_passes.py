"""Updates by one call, taken apart layer by layer, views that are taken once, and ops that only look at shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equivalence.compare import check_twins
from hocket.ir import Graph
from hocket.job import Job
from support.captures import captured_job
from support.steps import training_step

WIDE = 192  # a layer of it has 144 KiB of weights


def job(make: Callable[[Any], torch.optim.Optimizer], width: int = WIDE) -> Job:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())))
    optimizer = make(model.parameters())
    batches = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(3)]
    return Job(training_step(model, optimizer, nn.functional.mse_loss), model, optimizer, batches)


def updates(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops if "_fused_" in op.target]


def before(graph: Graph, name: str) -> set[str]:
    """All that the op waits for."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        more = set(graph.predecessors[waiting.pop()]) - found
        found |= more
        waiting += more
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda given: torch.optim.SGD(given, lr=0.1, fused=True),
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
        lambda given: torch.optim.Adam(given, lr=0.01, amsgrad=True, fused=True),
        lambda given: torch.optim.AdamW(given, lr=0.01, maximize=True, fused=True),
        lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.01), fused=True),
        lambda given: torch.optim.Adagrad(given, lr=0.01, fused=True),
    ],
    ids=["sgd", "nesterov", "amsgrad", "maximize", "rate", "adagrad"],
)
def test_layers_are_updated_by_ops_of_their_own_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    captured = check_twins(lambda: job(make))
    assert len(updates(captured.graph)) == 3


def test_a_layer_is_updated_as_soon_as_its_own_gradients_are_there() -> None:
    captured = check_twins(lambda: job(lambda given: torch.optim.SGD(given, lr=0.1, fused=True)))
    first, _, last = updates(captured.graph)
    is_late = [name for name in before(captured.graph, first) if name not in before(captured.graph, last)]
    assert any(name.startswith("0/") for name in is_late), "the first layer's gradients come last"
    assert last not in before(captured.graph, first)
    assert first not in before(captured.graph, last)


def test_small_layers_are_updated_together() -> None:
    captured = check_twins(lambda: job(lambda given: torch.optim.SGD(given, lr=0.1, fused=True), width=16))
    assert len(updates(captured.graph)) == 1


class Times(nn.Module):
    """A layer that is called many times, with views of its input and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = self.layer(x).tanh()
        x = x.clone()
        x.view(2, -1).mul_(2.0)  # a view that is written, and taken again
        return x.view(2, -1) + x.t().reshape(2, -1) + x.t().reshape(2, -1)


def times() -> Job:
    torch.manual_seed(0)
    model = Times()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 4), torch.randn(2, 8)) for _ in range(3)]
    return Job(training_step(model, optimizer, nn.functional.mse_loss), model, optimizer, batches)


def test_a_weight_is_transposed_once() -> None:
    program = check_twins(times).program
    transposed = [call for call in program.prologue.calls if call.func is torch.ops.aten.t.default]
    assert len(transposed) == 2  # for products and, from there, for their gradients; each of them 8 times before


def reshaping() -> Job:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        flat, same, moved = batch.view(-1), batch.view(-1), batch.view(-1)
        moved.unsqueeze_(0)
        loss = (model(batch).sum() * flat.sum() + moved.sum() * same.sum()) * batch.view(-1)[0]
        loss.backward()
        optimizer.step()
        return loss, flat, moved

    return Job(step, model, optimizer, [torch.randn(2, 4) for _ in range(3)])


def test_views_that_are_handed_back_or_reshaped_in_place_stay() -> None:
    check_twins(reshaping)


def test_the_masks_of_dropout_wait_for_one_another_alone() -> None:
    """They look at shapes alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = training_step(model, optimizer, nn.functional.mse_loss)
    graph = captured_job(Job(step, model, optimizer, [(torch.randn(2, 4), torch.randn(2, 4))])).graph
    masks = [op.name for op in graph.ops if op.target == "aten.bernoulli_"]
    assert len(masks) == 2
    ahead = {before for mask in masks for before in graph.predecessors[mask]}
    assert {graph[name].target for name in ahead} == {"aten.bernoulli_", "aten.empty_strided"}
