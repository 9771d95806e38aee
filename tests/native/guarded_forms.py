"""Every form of some steps under `guarded_heap.c`: on one thread, on two, and on two lanes.

python -m tests.native.guarded_forms FOLDER     a line for each form that was run
python -m tests.native.guarded_forms --beyond   writes one element behind a tensor: the process ends
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tests.support.captures import compiled_step
from tests.support.steps import training_step
from torch import nn

from hocket.autotune.forms import rewritten
from hocket.execution.native import NativeLanes
from hocket.ir import Lane, Plan
from hocket.native import load
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.capturing import capture_step
from hocket.tracing.float64 import float64_step
from hocket.tracing.variants import native_ops_of, rewrites_of

STEPS = 3


class Images(nn.Module):
    """Convolutions, norms with and without an addition, and pooling, of numbers that fill no vector."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 3, bias=False), nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.last = nn.Linear(channels, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = torch.relu(self.norms[1](self.second(x)) + x)
        x = nn.functional.leaky_relu(self.norms[2](self.up(nn.functional.max_pool2d(x, 2))), 0.2)
        return self.last(nn.functional.dropout(x.mean((2, 3)), 0.3))


def main(arguments: list[str]) -> None:
    if arguments == ["--beyond"]:
        ctypes.memset(torch.empty(1024).data_ptr() + 4096, 1, 4)
        return
    torch.manual_seed(0)
    load()
    convolutions()
    words = nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 7))
    for number, (model, x) in enumerate(
        [(Images(5), (3, 3, 11, 9)), (Images(11), (7, 3, 11, 9)), (Images(19), (8, 3, 8, 8)), (words, (5, 13))]
    ):
        batch = (torch.randn(x), torch.randint(0, 7, x[:1]))
        for form, captured in forms(model, batch, Path(arguments[0]) / str(number)):
            for plan in plans(captured):
                with closing(NativeLanes(captured, plan)) as lanes:
                    for _ in range(STEPS):
                        lanes(batch)
            print(type(model).__name__, form or "plain", flush=True)


def convolutions() -> None:
    """Winograd's ops of other sizes and paddings than a layer's."""
    sizes = {3: ((8, 9), (12, 36), (16, 16), (17, 80), (33, 31), (130, 70)), 4: ((16, 16), (48, 80), (128, 144))}
    for taps, channels, made in ((taps, *each) for taps, found in sizes.items() for each in found):
        for padding in ((0, 0), (1, 1), (2, 2), (0, 1)):
            for height, width in ((taps, taps), (4, 6), (9, 7)):
                x = torch.randn(2, channels, height, width).contiguous(memory_format=torch.channels_last)
                weight = torch.randn(made, channels, taps, taps)
                y = torch.ops.hocket.winograd_convolution(x, weight, weight[:, 0, 0, 0], padding)
                torch.ops.hocket.winograd_input_gradient(y, weight, weight[0, :, 0, 0], padding)
                torch.ops.hocket.winograd_weight_gradient(y, x, padding, taps, False)
    print("winograd", flush=True)


def forms(model: nn.Module, batch: Any, folder: Path) -> Iterator[tuple[str, Captured]]:
    """The plain form of training it, its rewrites, and the compiled one."""
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    step = training_step(model, optimizer)
    step(batch)

    def captured(step: Callable[[Any], Any]) -> Captured:
        return capture_step(step, model, optimizer, batch, split=False)

    plain = captured(step)
    yield "", relowered(plain, split=True)
    for form in rewrites_of("", plain):
        yield form, relowered(rewritten(plain, form), split=True, native_ops=native_ops_of(form))
    compiled = compiled_step(plain, folder, threads=2)
    yield "+compiled", compiled
    assert compiled.wide is not None
    float64_step(compiled.wide, batch, is_wide=True)


def plans(captured: Captured) -> list[Plan]:
    order = captured.graph.order
    single = [Plan((Lane("main", order, width=width),)) for width in (1, 2)]
    return [*single, Plan((Lane("first", order[::2], width=1), Lane("second", order[1::2], width=1)))]


if __name__ == "__main__":
    main(sys.argv[1:])
