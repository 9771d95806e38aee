"""Gradients that are nothing but rounding noise: what they change in a fused trial, and in a trial alone.

PointNet has parameters that its loss does not depend on: biases right before a batch norm, and those that one further
on removes. Their gradients are rounding noise, of which Adam makes full steps. In training nothing shows of them; in
evaluation the running means, which lag behind, do. So such a trial does not have the same values twice when its sums go
another way, and no closer bound than that holds for it in a slot. All else agrees to 1e-9.
"""

import copy
from functools import cache, partial

import pytest
import torch
from tests.search.searches import advance, run_alone
from torch import nn
from torch.nn import functional

from hocket import Training, zoo
from hocket.search.fused import FusedTrainer
from hocket.search.run import Run

POINTS, EPOCHS, RATE = 16, 6, 0.01


@cache
def pointnet():
    job = zoo.load("pointnet-cls", seed=0, points=POINTS, width=4, batch_size=8, num_batches=3)
    return job.models[0].double(), [(clouds.double(), labels) for clouds, labels in job.batches]


@cache
def noisy_names():
    """The parameters whose gradients are rounding noise: a millionth of a millionth of the others'."""
    model, batches = pointnet()
    model = copy.deepcopy(model)
    functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    size = {name: parameter.grad.abs().max().item() for name, parameter in model.named_parameters()}
    return frozenset(name for name, own in size.items() if own < 1e-12 * max(size.values()))


def train(params, kind=torch.optim.Adam, is_frozen=False, order=None):
    """A trial; its points may come in another order, which is another order of summing and nothing else."""
    first, batches = pointnet()
    model = copy.deepcopy(first)
    for name in noisy_names() if is_frozen else ():
        model.get_parameter(name).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = batches if order is None else [(clouds[..., order], labels) for clouds, labels in batches]
    return Training(model, kind(trained, lr=params["lr"]), functional.cross_entropy, data, functional.cross_entropy)


def alone(function):
    return run_alone(function, {"lr": RATE}, EPOCHS)


def in_a_slot(function):
    runs = [Run(number, {"lr": RATE * (1 + number)}, 0) for number in range(4)]
    trainer = FusedTrainer(function, runs, 0, frozenset({"lr"}))
    advance(trainer, EPOCHS)
    trainer.sync(0)
    return runs[0]


def reordered():
    return torch.randperm(POINTS, generator=torch.Generator().manual_seed(0))


def apart(first, second):
    return max(abs(mine - its) / max(1.0, abs(mine)) for mine, its in zip(first.values, second.values, strict=True))


def weights_apart(first, second):
    """The largest difference of weights, all of which the loss depends on, over the largest element of each."""
    its = dict(second.training.model.named_parameters())
    pairs = [(own, its[name]) for name, own in first.training.model.named_parameters() if name.endswith("weight")]
    return max(((own - other).abs().max() / own.abs().max()).item() for own, other in pairs)


def test_the_noise_is_in_biases_that_a_batch_norm_removes():
    model, _ = pointnet()
    assert {name.rsplit(".", 1)[1] for name in noisy_names()} == {"bias"}
    norms = {name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm1d)}
    before_norm = {name for name in noisy_names() if name.rsplit(".", 1)[0] not in norms}
    assert len(before_norm) == 9  # every layer that a norm follows directly, and no dropout lies between
    assert noisy_names() - before_norm == {"features.last.1.bias"}  # a maximum, a layer and another norm follow


def test_under_adam_a_trial_alone_is_not_the_same_twice():
    same = alone(train)
    assert apart(same, alone(train)) == 0.0
    other = alone(partial(train, order=reordered()))
    assert apart(same, other) > 1e-11
    without = partial(train, kind=torch.optim.SGD)
    assert apart(alone(without), alone(partial(without, order=reordered()))) < 1e-13


def test_in_a_slot_the_weights_are_as_alone():
    assert weights_apart(alone(train), in_a_slot(train)) <= 1e-9


@pytest.mark.parametrize("options", [{"is_frozen": True}, {"kind": torch.optim.SGD}], ids=["frozen", "sgd"])
def test_without_the_noise_the_values_are_as_alone(options):
    function = partial(train, **options)
    assert apart(alone(function), in_a_slot(function)) <= 1e-9
