"""Two image classifiers at the size of CIFAR-10, from the package pytorchcv.

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2015, for ResNet-20; G. Huang et al.,
"Densely Connected Convolutional Networks", 2016, for DenseNet-40 with a growth rate of 12. ResNet-20 is
nearly a chain; DenseNet-40 has many small operations between its convolutions.

    job = load("resnet20", batch_size=32)
"""

from __future__ import annotations

from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry, optional

PACKAGE = "pytorchcv"
EXTRA = "zoo"
SIDE = 32
OPTIONS = (Option("image_size", SIDE, "side of the square images, pixels", minimum=8),)


def build_resnet20(request: Request) -> Job:
    """ResNet-20; generated images ``[batch, 3, image_size, image_size]``."""
    return _build(request, "pytorchcv.models.resnet_cifar", "resnet20_cifar10")


def build_densenet40(request: Request) -> Job:
    """DenseNet-40, growth rate 12; generated images ``[batch, 3, image_size, image_size]``."""
    return _build(request, "pytorchcv.models.densenet_cifar", "densenet40_k12_cifar10")


def _build(request: Request, module: str, constructor: str) -> Job:
    models = optional(module, package=PACKAGE, extra=EXTRA, needed_by=request.name)
    model = getattr(models, constructor)(pretrained=False)
    side = request.size["image_size"]
    if side != SIDE:
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return classify.job(request, model, data.images(request, channels=3, side=side))


ENTRIES = (
    ZooEntry(
        name="resnet20",
        summary="ResNet-20 on generated images, 32 x 32 pixels",
        source="He et al., Deep Residual Learning for Image Recognition, 2015",
        build=build_resnet20,
        batch_size=128,
        options=OPTIONS,
        package=PACKAGE,
        extra=EXTRA,
    ),
    ZooEntry(
        name="densenet40",
        summary="DenseNet-40, growth rate 12, on generated images, 32 x 32 pixels",
        source="Huang et al., Densely Connected Convolutional Networks, 2016",
        build=build_densenet40,
        batch_size=64,
        options=OPTIONS,
        package=PACKAGE,
        extra=EXTRA,
    ),
)
