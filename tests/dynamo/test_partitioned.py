"""The cut between forward and backward: no view is kept where its base is."""

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx, nn

from hocket.dynamo.graphs import partitioned


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 6)


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for row in x:
            state = self.cell(row, state)
        return state[0]


def _cells() -> tuple[nn.Module, torch.Tensor]:
    return _Cells(), torch.randn(3, 4, 6)


def _attention() -> tuple[nn.Module, torch.Tensor]:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), torch.randn(3, 4, 6)


def _norms() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 2)), torch.randn(3, 4, 6)


@pytest.mark.parametrize("make", [_mlp, _cells, _attention, _norms])
def test_views_are_taken_again_with_eagers_bits(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make()
    graphs: list[fx.GraphModule] = []

    def kept(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]

    def forward(x: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        found = torch.func.functional_call(model, dict(zip(names, state, strict=True)), (x,))
        return found[0] if isinstance(found, tuple) else found

    run = aot_function(forward, fw_compiler=kept, bw_compiler=kept, partition_fn=partitioned)
    results = []
    for function in (run, forward):
        leaves = [x.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in model.parameters())]
        output = function(*leaves, *(buffer.clone() for buffer in model.buffers()))
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    returned = graphs[0].graph.output_node().args[0][1:]
    assert returned
    assert not any(getattr(node.target, "is_view", False) for node in returned)
