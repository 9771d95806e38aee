"""Batch norms are fused with their neighbours, and the step computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hocket.autotune.forms import rewritten
from hocket.native import available
from hocket.tracing.captured import relowered
from hocket.tracing.capturing import capture_step
from support.captures import closeness, kernels
from support.steps import update

pytestmark = pytest.mark.skipif(not available(), reason=available().why)

FORM = "+channels-last+fused-norm"


class Net(nn.Module):
    """Two convolutions and norms; `middle` makes one image of the first norm's and the second's."""

    def __init__(self, middle: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 8, 3, padding=1, bias=False) for n in (3, 8))
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.middle(self, x).mean((2, 3)))


def residual(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(net.norm1(x))
    return F.relu(net.norm2(net.second(x)) + x)


def residual_in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = F.relu_(net.norm1(x))
    y = net.norm2(net.second(x))
    y += x
    return F.relu_(y)


def seen_between(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.norm1(x)
    return F.relu(x) + net.norm2(net.second(x)) * x


def read_between(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm1(x)
    total = net.norm1.running_mean.sum()
    return F.relu(y + net.second(x)) * total


# Layers between the first convolution and the mean, and the kernels that are left beside the norms.
NETS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, int]]] = {
    "plain": (lambda net, x: net.norm2(net.second(net.norm1(x))), {}),
    "relus": (lambda net, x: F.relu_(net.norm2(net.second(F.relu(net.norm1(x))))), {}),
    "residual": (residual, {}),  # the two gradients of the first norm's result are added in place, where it is kept
    "residual in place": (residual_in_place, {}),
    "both branches": (lambda net, x: F.relu(net.norm1(x) + net.norm2(net.second(x))), {}),
    "seen between": (seen_between, {"relu": 1, "threshold_backward": 1}),
    "read between": (read_between, {"relu": 1}),
}


def case(middle: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net(middle)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batch = (torch.randn(6, 3, 5, 5), torch.randint(0, 4, (6,)))

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = net(batch[0])
        return update(optimizer, F.cross_entropy(out.float(), batch[1]))

    step(batch)
    captured = capture_step(step, net, optimizer, batch, split=False)
    return step, batch, captured, rewritten(captured, FORM)


@pytest.mark.parametrize("name", NETS)
def test_steps_with_fused_norms_are_close(name: str) -> None:
    middle, left = NETS[name]
    step, batch, captured, fused = case(middle)
    count = kernels(fused)
    num_norms = 1 if middle is read_between else 2
    assert count["norm_forward"] == count["norm_backward"] == num_norms
    assert not count["native_batch_norm"] + count["native_batch_norm_backward"]
    for kernel in ("relu", "relu_", "threshold_backward"):
        assert count[kernel] == left.get(kernel, 0), count
    seen = closeness(captured, fused, step, batch)
    assert seen.holds, seen.why


def test_in_bfloat16_under_autocast() -> None:
    step, batch, captured, fused = case(residual, torch.bfloat16)
    assert kernels(fused)["norm_forward"] == 2
    seen = closeness(captured, fused, step, batch, samples=1)
    assert seen.holds, seen.why


def test_norms_in_evaluation_or_of_other_layouts_stay() -> None:
    _, _, captured, fused = case(NETS["relus"][0])
    assert not kernels(relowered(captured, split=False, native_ops=["fused-norm"]))["norm_forward"], (
        "channels come first"
    )
    again = relowered(fused, split=True)
    assert kernels(again)["norm_forward"] == 2, "a backward that is split otherwise keeps them"
    assert len(again.graph) > len(fused.graph)
