"""The optimizers by name, with the settings that they promise."""

import pytest
import torch
from torch import nn

from hocket import zoo
from hocket.zoo import training


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4}),
        ("adam", torch.optim.Adam, {"lr": 0.3, "betas": (0.5, 0.9), "weight_decay": 0}),
        ("adamw", torch.optim.AdamW, {"lr": 0.3, "betas": (0.5, 0.9), "weight_decay": 1e-2}),
    ],
)
def test_settings(name, kind, settings):
    optimizer = training.make_optimizer(name, 0.3, nn.Linear(2, 2).parameters(), betas=(0.5, 0.9))
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


def test_another_optimizer_than_the_entrys_own_has_its_own_rate():
    def rate(name):
        return zoo.load("mlp", optimizer=name, depth=1).optimizer.param_groups[0]["lr"]

    assert rate("sgd") == zoo.entries()["mlp"].lr
    assert rate("adamw") == 1e-3


@pytest.mark.parametrize("name", training.DEFAULT_LR)
def test_every_optimizer_trains(name):
    job = zoo.load("mlp", optimizer=name, depth=2, width=16)
    losses = [job.step(job.batch(index)).item() for index in range(60)]
    assert losses[-1] < 0.8 * losses[0]
