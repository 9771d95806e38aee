"""For every entry of the zoo the smallest size at which tests run it."""

from typing import Any

TINY_SIZES: dict[str, dict[str, Any]] = {
    "digits-cnn": {"width": 4},
    "lenet": {"image_size": 12},
    "mlp": {"depth": 3, "width": 16},
    "lstm-cells": {"steps": 3, "width": 8, "vocab": 12},
    "lstm-lm": {"steps": 4, "width": 8, "vocab": 12},
    "transformer": {"steps": 6, "width": 16, "depth": 1, "vocab": 12},
    "bert-tiny": {"steps": 6, "width": 64, "depth": 1, "vocab": 12},
    "dcgan": {"image_size": 16, "width": 4},
    "resnet20": {"image_size": 8},
    "densenet40": {"image_size": 8},
    "pointnet-cls": {"points": 16, "width": 4},
    "pointnet-seg": {"points": 16, "width": 4},
    "bert-medium": {"steps": 6, "width": 64, "depth": 2, "vocab": 12},
    "mobilenet-v2": {"image_size": 32},
    "mobilenet-v3-large": {"image_size": 64},
    "alexnet": {"image_size": 67},
    "caffenet": {"image_size": 67},
    "googlenet": {"image_size": 32},
    **{f"resnet{depth}": {"image_size": 32} for depth in (18, 34, 50, 101, 152)},
    **{name: {"image_size": 32} for name in ("resnet50-v2", "resnet101-v2", "vgg11", "vgg16", "vgg19", "inception-v2")},
    "inception-v3": {"image_size": 75},
}
