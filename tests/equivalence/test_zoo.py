"""Every entry of the zoo with every optimizer: five planned steps are five eager steps, bit for bit."""

import functools

import pytest

from equivalence.compare import check_twins
from hocket import zoo
from quick import covering
from tiny_sizes import TINY_SIZES

LARGE = {
    "densenet40",
    "mobilenet-v2",
    "mobilenet-v3-large",
    "alexnet",
    "caffenet",
    "googlenet",
    "vgg11",
    "vgg16",
    "vgg19",
    "inception-v2",
    "inception-v3",
}
LARGE |= {name for name in TINY_SIZES if name.startswith("resnet") and name != "resnet20"}
CASES = covering(
    [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in TINY_SIZES],
    ("sgd", "adam", "adamw"),
)


def load(name: str, optimizer: str | None = None):
    return zoo.load(name, batch_size=2, num_batches=3, optimizer=optimizer, **TINY_SIZES[name])


def test_every_entry_is_tried():
    assert set(TINY_SIZES) == set(zoo.entries())


@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_steps_of_every_entry_are_those_of_eager(name, optimizer):
    check_twins(functools.partial(load, name, optimizer))


@pytest.mark.parametrize("name", ["digits-cnn", "lenet", "dcgan", "resnet20"])
def test_a_split_backward_is_within_rounding(name):
    check_twins(functools.partial(load, name, "sgd"), split=True, tolerance=1e-4)
