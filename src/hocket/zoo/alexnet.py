"""AlexNet and CaffeNet: five convolutions, two of them and one more in two groups, and three linear layers.

Sources: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural Networks",
2012; CaffeNet is its variant in Y. Jia et al., "Caffe: Convolutional Architecture for Fast Feature Embedding", 2014,
which pools before it normalises. Both with local response normalisation, dropout, and images of 227 x 227 pixels, as
Caffe trains them.

    job = load("alexnet", image_size=67, batch_size=2)
"""

from __future__ import annotations

from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry

SIDE = 227
CLASSES = 1000
OPTIONS = (Option("image_size", SIDE, "side of the square images, pixels", minimum=67),)


def build_alexnet(request: Request) -> Job:
    """AlexNet; generated images ``[batch, 3, image_size, image_size]``."""
    return _build(request, pool_first=False)


def build_caffenet(request: Request) -> Job:
    """CaffeNet; generated images ``[batch, 3, image_size, image_size]``."""
    return _build(request, pool_first=True)


def _build(request: Request, *, pool_first: bool) -> Job:
    side = request.size["image_size"]
    model = nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(inplace=True), *_smaller(pool_first)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(inplace=True), *_smaller(pool_first)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(256 * _last_side(side) ** 2, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(4096, CLASSES),
    )
    return classify.job(request, classify.initialised(model), data.images(request, channels=3, side=side))


def _smaller(pool_first: bool) -> tuple[nn.Module, nn.Module]:
    pool, norm = nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
    return (pool, norm) if pool_first else (norm, pool)


def _last_side(side: int) -> int:
    side = (side - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


ENTRIES = (
    ZooEntry(
        name="alexnet",
        summary="AlexNet on generated images, 227 x 227 pixels",
        source="Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural Networks, 2012",
        build=build_alexnet,
        batch_size=16,
        lr=0.002,
        options=OPTIONS,
    ),
    ZooEntry(
        name="caffenet",
        summary="CaffeNet on generated images, 227 x 227 pixels",
        source="Jia et al., Caffe: Convolutional Architecture for Fast Feature Embedding, 2014",
        build=build_caffenet,
        batch_size=16,
        lr=0.002,
        options=OPTIONS,
    ),
)
