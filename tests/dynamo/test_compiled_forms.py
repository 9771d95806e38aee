"""Compiled forms of regions: what Inductor makes of the graphs of a compiled model, next to the other forms."""

import copy

import pytest
import torch
from torch import nn

from support.regions import made_regions


@pytest.mark.slow
def test_regions_are_compiled_and_train_on_close_to_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    twin = copy.deepcopy(model)
    data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]

    def train(run: nn.Module, own: nn.Module, num_steps: int) -> list[float]:
        losses = []
        for number in range(num_steps):
            x, y = data[number % len(data)]
            own.zero_grad()
            loss = nn.functional.cross_entropy(run(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter -= 0.05 * parameter.grad
            losses.append(loss.item())
        return losses

    with made_regions(guard=True, takes_turns=False) as regions:
        compiled = torch.compile(model, backend="hocket", options={"numerics": "close"})
        losses = train(compiled, model, 160)
        called = [region for region in regions if region.was_called]
        assert called
        assert all(region.compile() for region in called)
        losses += train(compiled, model, 400)
    assert losses == pytest.approx(train(twin, twin, 560), rel=1e-3)
    assert not any(region.compile() for region in called)  # nothing is left to be compiled
