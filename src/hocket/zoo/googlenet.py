"""GoogLeNet, the first of the Inception networks: four ways side by side in each of nine blocks.

Source: C. Szegedy et al., "Going Deeper with Convolutions", 2014, Table 1; without its two auxiliary classifiers, and
as there without batch normalisation.

    job = load("googlenet", image_size=32, batch_size=2)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry

SIDE = 224
CLASSES = 1000

# Channels in; out of 1x1, of 3x3 (reduced, full), of 5x5 (reduced, full), behind the pooling; None: a pooling layer.
BLOCKS = (
    *((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64), None),
    *((480, 192, 96, 208, 16, 48, 64), (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64)),
    *((512, 112, 144, 288, 32, 64, 64), (528, 256, 160, 320, 32, 128, 128), None),
    *((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Four ways from one input ``[batch, channels, h, w]``, their results joined along the channels."""

    def __init__(self, channels: int, one: int, low3: int, three: int, low5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = _convolution(channels, one, 1)
        self.three = nn.Sequential(_convolution(channels, low3, 1), _convolution(low3, three, 3))
        self.five = nn.Sequential(_convolution(channels, low5, 1), _convolution(low5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _convolution(channels, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def build(request: Request) -> Job:
    """GoogLeNet; generated images ``[batch, 3, image_size, image_size]``."""
    layers: list[nn.Module] = [
        *(_convolution(3, 64, 7, stride=2), _pool(), nn.LocalResponseNorm(5)),
        *(_convolution(64, 64, 1), _convolution(64, 192, 3), nn.LocalResponseNorm(5), _pool()),
        *(_pool() if channels is None else Inception(*channels) for channels in BLOCKS),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, CLASSES)),
    ]
    model = classify.initialised(nn.Sequential(*layers))
    return classify.job(request, model, data.images(request, channels=3, side=request.size["image_size"]))


def _convolution(channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, size, stride=stride, padding=size // 2), nn.ReLU(inplace=True)
    )


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


ENTRY = ZooEntry(
    name="googlenet",
    summary="GoogLeNet on generated images, 224 x 224 pixels",
    source="Szegedy et al., Going Deeper with Convolutions, 2014",
    build=build,
    batch_size=8,
    lr=0.005,
    options=(Option("image_size", SIDE, "side of the square images, pixels", minimum=32),),
)
