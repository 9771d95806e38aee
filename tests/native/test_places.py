"""Native reads of Python places: what stands there, where something else stood before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket import native
from support.steps import update

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native core")


@pytest.mark.parametrize("value", [None, 1, "text", [torch.ones(2)]])
def test_value_of_another_type_is_seen_at_each_read(value):
    """A dict that was not written to since a read that failed still holds what made it fail."""
    table = {"weight": torch.ones(2)}
    check = native.load().Signature((), [], True)
    place = check.add_item(check.add_object(table), "weight")
    check.expect_parameter(place)
    assert check.holds(())
    table["weight"] = value
    assert [check.holds(()) for _ in range(3)] == [False] * 3
    table["weight"] = torch.ones(2)
    assert check.holds(())


@pytest.mark.parametrize("attribute", ["bias", "weight"])
def test_parameter_becomes_none_between_steps(attribute):
    """Several calls in a row without a parameter that a plan has, and calls with it again."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        return update(optimizer, model(x).pow(2).mean())

    x = torch.randn(3, 4)
    fast = hocket.schedule(step, model, optimizer, guard=False, planner="serial", cache=False)
    with fast:
        for _ in range(14):
            fast(x)
        kept = getattr(model[0], attribute)
        setattr(model[0], attribute, None)
        for _ in range(20):
            fast(x)
        setattr(model[0], attribute, kept)
        assert torch.isfinite(fast(x))
