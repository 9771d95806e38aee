"""Every entry of the zoo with every optimizer: five planned steps are five eager steps, bit for bit."""

from __future__ import annotations

import functools

import pytest

from equivalence.compare import check_twins
from hocket import zoo
from quick import covering

SIZES = {
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
    "vgg16": {"image_size": 32},
    "inception-v3": {"image_size": 75},
}
LARGE = {
    "densenet40",
    "mobilenet-v2",
    "mobilenet-v3-large",
    "alexnet",
    "caffenet",
    "googlenet",
    "vgg16",
    "inception-v3",
}
LARGE |= {name for name in SIZES if name.startswith("resnet") and name != "resnet20"}
CASES = covering(
    [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in SIZES], ("sgd", "adam", "adamw")
)


def load(name: str, optimizer: str | None = None):
    return zoo.load(name, batch_size=2, num_batches=3, optimizer=optimizer, **SIZES[name])


def test_every_entry_is_tried():
    assert set(SIZES) == set(zoo.entries())


@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_steps_of_every_entry_are_those_of_eager(name, optimizer):
    check_twins(functools.partial(load, name, optimizer))


@pytest.mark.parametrize("name", ["digits-cnn", "lenet", "dcgan", "resnet20"])
def test_a_split_backward_is_within_rounding(name):
    check_twins(functools.partial(load, name, "sgd"), split=True, tolerance=1e-4)
