"""A warning where torch would take one number over all fused models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hocket


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_couple_models_are_named(name):
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.warns(UserWarning, match=f"torch.optim.{name} takes"):
        getattr(torch.optim, name)(array.parameters())


def test_parameters_in_a_group_are_seen_too():
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.warns(UserWarning, match="as they do alone"):
        torch.optim.Adafactor([{"params": array.parameters()}])


def test_optimizers_that_go_element_by_element_are_not():
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, hocket.optim.Adam):
            kind(array.parameters(), lr=0.1)
        torch.optim.LBFGS(nn.Linear(3, 2).parameters())
