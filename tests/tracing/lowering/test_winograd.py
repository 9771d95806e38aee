"""Convolutions are made by Winograd's algorithm where it pays, and the step computes the same."""

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
from hocket.tracing.variants import rewrites_of
from support.captures import closeness, kernels
from support.steps import training_step

pytestmark = pytest.mark.skipif(not available(), reason=available().why)

FORM = "+channels-last+winograd"


class Functional(nn.Module):
    """The same as a module of torch's, by a function on a parameter of its own."""

    def __init__(self, made: int, channels: int) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(made, channels, 3, 3) / channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.filters)


def layers(*convolutions: nn.Module) -> nn.Sequential:
    between = [each for convolution in convolutions for each in (convolution, nn.GELU())]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *between, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(4)
    )


def case(*convolutions: nn.Module, size: int = 12) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = layers(*convolutions)
    batch = (torch.randn(4, 3, size, size), torch.randint(0, 4, (4,)))
    net(batch[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    step = training_step(net, optimizer)
    step(batch)
    captured = capture_step(step, net, optimizer, batch, split=False)
    assert rewrites_of("", captured)[-1] == "+channels-last+winograd+fused-update"
    return step, batch, captured, rewritten(captured, FORM)


@pytest.mark.parametrize(
    "convolution",
    [
        lambda: nn.Conv2d(16, 24, 3, padding=1),
        lambda: nn.Conv2d(16, 24, 3, padding="same", bias=False),
        lambda: nn.Conv2d(16, 24, 3, padding=(0, 2)),
        lambda: nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last),
        lambda: nn.ConvTranspose2d(16, 24, 3, padding=1),
        lambda: nn.Conv2d(16, 32, 4, stride=2, padding=1),
        lambda: nn.Conv2d(16, 48, 4, stride=2, padding=(0, 2), bias=False).to(memory_format=torch.channels_last),
        lambda: nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1),
        lambda: nn.ConvTranspose2d(16, 48, 4, stride=2, bias=False),
        lambda: Functional(24, 16),
    ],
)
def test_steps_are_close(convolution: Callable[[], nn.Module]) -> None:
    step, batch, captured, tiled = case(convolution(), size=24)
    count = kernels(tiled)
    assert [count[f"winograd_{kernel}"] for kernel in ("convolution", "input_gradient", "weight_gradient")] == [1, 1, 1]
    assert count["convolution"] == count["convolution_backward"] == 1, "three channels are too few"
    seen = closeness(captured, tiled, step, batch)
    assert seen.holds, seen.why
    assert count["copy_"] <= 2, "only torch's own gradient of filters is brought into another layout"


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(16, 24, 3, padding=1, stride=2),
        nn.Conv2d(16, 24, 3, padding=2, dilation=2),
        nn.Conv2d(16, 32, 3, padding=1, groups=2),
        nn.Conv2d(16, 4, 3, padding=1),
        nn.Conv2d(16, 24, 5, padding=2),
        nn.Conv2d(16, 24, 3, padding=3),
        nn.Conv2d(16, 24, 4, stride=2, padding=1),
        nn.Conv2d(16, 32, 4, padding=1),
        nn.Conv2d(16, 32, 4, stride=(2, 1), padding=1),
        nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(16, 24, 3, padding=1, stride=2),
    ],
)
def test_other_convolutions_stay(convolution: nn.Module) -> None:
    wanted = nn.Conv2d(convolution.out_channels, 16, 3, padding=1)  # one of them is tiled, so there is such a form
    if convolution.out_channels < 8:
        wanted = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, padding=1))
    _, _, _, tiled = case(convolution, wanted, size=24)
    count = kernels(tiled)
    assert count["winograd_convolution"] == count["winograd_weight_gradient"] == 1
    assert count["convolution"] == count["convolution_backward"] >= 2


def test_a_row_that_no_filter_reads_has_no_gradient_by_tiles() -> None:
    pooled = nn.Sequential(nn.AvgPool2d(2, stride=1), nn.Conv2d(16, 32, 4, stride=2, padding=1))
    _, _, _, tiled = case(pooled, nn.Conv2d(32, 32, 3, padding=1), size=24)
    assert kernels(tiled)["winograd_convolution"] == 1
    assert kernels(tiled)["convolution"] == 2, "of 23 rows the last one is read by none"


def test_a_step_of_few_tiles_keeps_torchs() -> None:
    _, _, _, tiled = case(nn.Conv2d(16, 24, 3, padding=1), size=6)
    count = kernels(tiled)
    assert not count["winograd_convolution"], "36 tiles: transforming the filters would take as long as the products"
    assert count["convolution"] == count["convolution_backward"] == 2


def test_channels_that_come_first_stay_and_a_split_keeps_the_ops() -> None:
    _, _, captured, tiled = case(nn.Conv2d(16, 24, 3, padding=1))
    first = relowered(captured, split=False, native_ops=["winograd"])
    assert not kernels(first)["winograd_convolution"]
    again = relowered(tiled, split=True)
    assert kernels(again)["winograd_weight_gradient"] == 1
    names = {op.name: op.role for op in again.graph.ops}
    assert names["1/winograd_weight_gradient.weight"] == "weight_grad"
    assert names["1/sum.bias"] == "bias_grad"
    assert names["1/winograd_input_gradient.activation"] == "activation_grad"
