"""Image classifiers at the size of ImageNet, from the package pytorchcv, with 1,000 outputs.

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2015, for ResNet-18 to ResNet-152; K.
Simonyan & A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014, for VGG-16;
C. Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, for Inception-v3 (without its
auxiliary classifier); M. Sandler et al., "MobileNetV2", 2018; A. Howard et al., "Searching for MobileNetV3", 2019.
Inception-v3 has branches side by side; VGG-16 keeps most of its bytes in one linear
layer. The batches are small, so that a few cores can run them.

    job = load("inception-v3", image_size=96, batch_size=2)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry, optional

PACKAGE = "pytorchcv"
EXTRA = "zoo"
SIDE = 224
INCEPTION_SIDE = 299
CLASSES = 1000
SIDE_SUMMARY = "side of the square images, pixels"


def build_resnet(request: Request) -> Job:
    """The ResNet that the request names; generated images ``[batch, 3, image_size, image_size]``."""
    return _pooled(request, "resnet", request.name)


def build_mobilenet_v2(request: Request) -> Job:
    """MobileNetV2; generated images ``[batch, 3, image_size, image_size]``."""
    return _pooled(request, "mobilenetv2", "mobilenetv2_w1")


def build_mobilenet_v3(request: Request) -> Job:
    """MobileNetV3-Large; generated images ``[batch, 3, image_size, image_size]``."""
    return _pooled(request, "mobilenetv3", "mobilenetv3_large_w1")


def _pooled(request: Request, module: str, constructor: str) -> Job:
    """A network that ends in a pooling over the whole image, which at another size is over another number of pixels."""
    model = getattr(_module(request, module), constructor)(pretrained=False)
    if request.size["image_size"] != SIDE:
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return _job(request, model)


def build_vgg16(request: Request) -> Job:
    """VGG-16 without batch normalisation; generated images ``[batch, 3, image_size, image_size]``.

    At another size than 224 pixels its first linear layer has as many inputs as the last pooling leaves.
    """
    vgg = _module(request, "vgg")
    model = vgg.vgg16(pretrained=False)
    side = request.size["image_size"]
    if side != SIDE:
        model.output = vgg.VGGOutputBlock(in_channels=512 * (side // 32) ** 2, classes=CLASSES)
    return _job(request, model)


def build_inception_v3(request: Request) -> Job:
    """Inception-v3; generated images ``[batch, 3, image_size, image_size]``."""
    model = _module(request, "inceptionv3").inceptionv3(pretrained=False)
    if request.size["image_size"] != INCEPTION_SIDE:
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return _job(request, model)


def _module(request: Request, name: str) -> Any:
    return optional(f"pytorchcv.models.{name}", package=PACKAGE, extra=EXTRA, needed_by=request.name)


def _job(request: Request, model: nn.Module) -> Job:
    return classify.job(request, model, data.images(request, channels=3, side=request.size["image_size"]))


ENTRIES = (
    ZooEntry(
        name="mobilenet-v2",
        summary="MobileNetV2 on generated images, 224 x 224 pixels",
        source="Sandler et al., MobileNetV2, 2018",
        build=build_mobilenet_v2,
        batch_size=8,
        lr=0.01,
        options=(Option("image_size", SIDE, SIDE_SUMMARY, minimum=32),),
        package=PACKAGE,
        extra=EXTRA,
    ),
    ZooEntry(
        name="mobilenet-v3-large",
        summary="MobileNetV3-Large on generated images, 224 x 224 pixels",
        source="Howard et al., Searching for MobileNetV3, 2019",
        build=build_mobilenet_v3,
        batch_size=8,
        lr=0.01,
        options=(Option("image_size", SIDE, SIDE_SUMMARY, minimum=32),),
        package=PACKAGE,
        extra=EXTRA,
    ),
    *(
        ZooEntry(
            name=f"resnet{depth}",
            summary=f"ResNet-{depth} on generated images, 224 x 224 pixels",
            source="He et al., Deep Residual Learning for Image Recognition, 2015",
            build=build_resnet,
            batch_size=batch_size,
            lr=0.002,
            options=(Option("image_size", SIDE, SIDE_SUMMARY, minimum=32),),
            package=PACKAGE,
            extra=EXTRA,
        )
        for depth, batch_size in ((18, 16), (34, 16), (50, 8), (101, 4), (152, 4))
    ),
    ZooEntry(
        name="vgg16",
        summary="VGG-16 on generated images, 224 x 224 pixels",
        source="Simonyan & Zisserman, Very Deep Convolutional Networks, 2014",
        build=build_vgg16,
        batch_size=8,
        lr=0.002,
        options=(Option("image_size", SIDE, SIDE_SUMMARY, minimum=32),),
        package=PACKAGE,
        extra=EXTRA,
    ),
    ZooEntry(
        name="inception-v3",
        summary="Inception-v3 on generated images, 299 x 299 pixels",
        source="Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015",
        build=build_inception_v3,
        batch_size=8,
        lr=0.005,
        options=(Option("image_size", INCEPTION_SIDE, SIDE_SUMMARY, minimum=75),),
        package=PACKAGE,
        extra=EXTRA,
    ),
)
