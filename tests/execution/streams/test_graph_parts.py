"""The parts of a step with attention whose seed is on the device in a graph and on the CPU outside of one."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from execution.streams.deferred import Deferred
from hocket.execution.streams.graph_parts import graph_parts
from hocket.tracing.capturing import capture_step


@pytest.fixture(scope="module")
def attention() -> Iterator[None]:
    """Ops with the signature of those that hand on a seed."""
    library = torch.library.Library("hocket_tests", "FRAGMENT")
    library.define("attend(Tensor x, float dropout_p) -> (Tensor output, Tensor philox_seed)")
    library.define("attend_backward(Tensor x, Tensor seed) -> Tensor")
    library.impl("attend", lambda x, dropout_p: (x * 2, torch.ones((), dtype=torch.long)), "CompositeExplicitAutograd")
    library.impl("attend_backward", lambda x, seed: x + seed, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.parametrize(("dropout", "moves", "is_inside"), [(0.1, True, False), (0.0, True, True), (0.1, False, True)])
@pytest.mark.usefixtures("attention")
def test_a_seed_does_not_leave_the_graph(dropout: float, moves: bool, is_inside: bool) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        made, seed = torch.ops.hocket_tests.attend(batch, dropout)
        made = made * optimizer.param_groups[0]["lr"] if moves else made + 1
        return torch.ops.hocket_tests.attend_backward(made, seed)

    captured = capture_step(step, net, optimizer, torch.ones(2, 2))
    parts = graph_parts(captured, Deferred(0))
    (name,) = (op.name for op in captured.graph.ops if op.target.endswith("attend"))
    assert (name in parts.inside) is is_inside, parts
    assert parts.inside.isdisjoint(parts.after)
