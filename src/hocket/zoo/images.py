"""Classifiers: a multilayer perceptron, and convolutional nets from LeNet to those of ImageNet's size.

- ``mlp`` is deep and narrow: its ops are too small to fill even one core, so the time between them dominates.
- ``digits-cnn`` trains on real data: the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn. Its 28
  batches are one pass over them.
- ``lenet`` is LeNet-5 as it is used today, with ReLU and maximum pooling.
- ``alexnet`` and ``caffenet`` have local response normalisation, dropout, and images of 227 x 227 pixels, as in Caffe.
  CaffeNet pools before it normalises.
- ``googlenet`` has four branches in parallel in each of nine blocks (Table 1 of the paper), without the two auxiliary
  classifiers, and as there without batch normalisation.
- The others come from the package ``pytorchcv``. ResNet-20 is nearly a chain, DenseNet-40 has many small ops between
  its convolutions, Inception-v2 and v3 (v3 without its auxiliary classifier) have parallel branches, and VGG keeps most
  of its bytes in one linear layer. ResNets called v2 normalise before they convolve. Batches of networks of ImageNet's
  size are small, so that a few cores can run them.

Except for ``mlp``, inputs are images ``[batch, channels, image_size, image_size]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Request
from hocket.zoo.training import classifier_job, initialised

CLASSES = 1000
MAX_PIXEL = 16.0

# GoogLeNet's blocks. Channels in, then out of 1x1, of 3x3 (reduced, full), of 5x5 (reduced, full), after the pooling.
# None: a pooling layer.
BLOCKS = (
    *((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64), None),
    *((480, 192, 96, 208, 16, 48, 64), (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64)),
    *((512, 112, 144, 288, 32, 64, 64), (528, 256, 160, 320, 32, 128, 128), None),
    *((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
)


def mlp(request: Request) -> Job:
    """Build ``depth`` hidden layers, ``width`` wide, and a linear one on generated vectors ``[batch, width]``."""
    width = request.size["width"]
    hidden = [layer for _ in range(request.size["depth"]) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, data.NUM_LABELS))
    return classifier_job(request, initialised(model), data.vectors(request, width=width))


def digits_cnn(request: Request) -> Job:
    """Build two convolutions and two linear layers on images ``[batch, 1, 8, 8]`` from 0 to 1."""
    width = request.size["width"]
    batches = _digits(request)
    model = nn.Sequential(
        *(nn.Conv2d(1, width, kernel_size=3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(2 * width * 4 * 4, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10)),
    )
    return classifier_job(request, initialised(model), batches)


def _digits(request: Request) -> list[tuple[Tensor, Tensor]]:
    """Cut shuffled passes over the data, one after the other, into batches."""
    digits = request.optional("sklearn.datasets").load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
    labels = torch.tensor(digits.target, dtype=torch.int64)
    drawn = data.generator(request)
    passes = -(-request.num_batches * request.batch_size // len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=drawn) for _ in range(passes)])
    picked = order.split(request.batch_size)[: request.num_batches]
    return [(pictures[rows].to(request.device), labels[rows].to(request.device)) for rows in picked]


def lenet(request: Request) -> Job:
    """Build two convolutions and three linear layers."""
    pooled = (request.size["image_size"] // 2 - 4) // 2
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * pooled * pooled, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    return _job(request, initialised(model), channels=1)


def alexnet(request: Request) -> Job:
    """Build AlexNet, or CaffeNet if the request is for it."""
    side = (request.size["image_size"] - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1

    def smaller() -> tuple[nn.Module, nn.Module]:
        pool, norm = nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
        return (pool, norm) if request.name == "caffenet" else (norm, pool)

    model = nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(inplace=True), *smaller()),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(inplace=True), *smaller()),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(256 * side**2, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(4096, CLASSES),
    )
    return _job(request, initialised(model))


class Inception(nn.Module):
    """Four branches from one input ``[batch, channels, h, w]``, their results joined along the channels."""

    def __init__(self, channels: int, one: int, low3: int, three: int, low5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = _convolution(channels, one, 1)
        self.three = nn.Sequential(_convolution(channels, low3, 1), _convolution(low3, three, 3))
        self.five = nn.Sequential(_convolution(channels, low5, 1), _convolution(low5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _convolution(channels, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def googlenet(request: Request) -> Job:
    """Build GoogLeNet."""
    layers: list[nn.Module] = [
        *(_convolution(3, 64, 7, stride=2), _pool(), nn.LocalResponseNorm(5)),
        *(_convolution(64, 64, 1), _convolution(64, 192, 3), nn.LocalResponseNorm(5), _pool()),
        *(_pool() if channels is None else Inception(*channels) for channels in BLOCKS),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, CLASSES)),
    ]
    return _job(request, initialised(nn.Sequential(*layers)))


def _convolution(channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out_channels, size, stride=stride, padding=size // 2)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def pytorchcv(module: str, constructor: str, side: int) -> Callable[[Request], Job]:
    """Return the builder of a network of pytorchcv, which is made for images of `side` pixels.

    At another size, its last pooling or, in a VGG, its first linear layer is replaced by one that fits.
    """

    def build(request: Request) -> Job:
        models = request.optional(f"pytorchcv.models.{module}")
        model = getattr(models, constructor)(pretrained=False)
        actual = request.size["image_size"]
        if actual != side and module == "vgg":
            model.output = models.VGGOutputBlock(in_channels=512 * (actual // 32) ** 2, classes=CLASSES)
        elif actual != side:
            model.features.final_pool = nn.AdaptiveAvgPool2d(1)
        return _job(request, model)

    return build


def _job(request: Request, model: nn.Module, channels: int = 3) -> Job:
    images = data.images(request, channels=channels, side=request.size["image_size"])
    return classifier_job(request, model, images)
