"""Models without a gradient of a parameter that others have one of: their optimizers leave it as it is, as alone."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.oracle import assert_close
from torch import nn
from torch.nn import functional as F

import hocket

D = torch.float64
RATES = [0.01, 0.02, 0.03]
pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


class Gate(nn.Module):
    """Reads one of two layers, by values."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        is_first = float(x.detach().sum() + 9 * self.c.bias.detach().sum()) > 0
        return self.c(x) + (self.a(x) if is_first else self.b(x))


class Depth(nn.Module):
    """Reads some of its layers, by a number that it holds: models have other graphs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = layer(x).tanh()
        return self.head(x)


def trained_alone_and_fused(kind, optimizer, options, calls, set_to_none, scheduled=False):
    torch.manual_seed(0)
    plain = [kind(index + 1).to(D) for index in range(3)]
    array = hocket.fuse(copy.deepcopy(plain), shared=True)
    fused = getattr(hocket.optim, optimizer)(array.parameters(), lr=RATES, **options)
    own = [getattr(torch.optim, optimizer)(m.parameters(), lr=r, **options) for m, r in zip(plain, RATES, strict=True)]

    def step(batches):
        fused.zero_grad(set_to_none=set_to_none)
        for x, y in batches:
            losses = array.losses(F.cross_entropy, x, y) if calls == 1 else array.loss(F.cross_entropy, array(x), y)
            losses.sum().backward()
        fused.step()
        return losses

    run = hocket.schedule(step, array, fused, guard=False, cache=False) if scheduled else step
    for _ in range(40 if scheduled else 8):
        batches = [(torch.randn(6, 4, dtype=D), torch.randint(0, 3, (6,))) for _ in range(calls)]
        run(batches)
        for model, optim in zip(plain, own, strict=True):
            optim.zero_grad(set_to_none=set_to_none)
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
            optim.step()
    for index, (model, found) in enumerate(zip(plain, array.unfuse(), strict=True)):
        for name, parameter in found.named_parameters():
            assert_close(parameter, model.get_parameter(name), f"{name} of model {index}")
    for mine, theirs in zip(fused.unfuse(), own, strict=True):
        for number, entries in theirs.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    assert_close(torch.as_tensor(mine["state"][number][key]).to(D), value.to(D), key)
    return run


OPTIONS = {
    "SGD": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "AdamW": {"weight_decay": 0.2, "amsgrad": True},
    "NAdam": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize(("calls", "set_to_none"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("optimizer", OPTIONS)
def test_a_branch_that_a_model_does_not_take_stays_as_it_is(optimizer, calls, set_to_none):
    trained_alone_and_fused(Gate, optimizer, OPTIONS[optimizer], calls, set_to_none)


@pytest.mark.parametrize("optimizer", OPTIONS)
def test_layers_that_a_model_does_not_have_stay_as_they_are(optimizer):
    trained_alone_and_fused(Depth, optimizer, OPTIONS[optimizer], 1, set_to_none=True)


@pytest.mark.slow
def test_a_scheduled_step_leaves_them_too():
    fast = trained_alone_and_fused(Depth, "SGD", OPTIONS["SGD"], 1, set_to_none=True, scheduled=True)
    assert fast.verdict == "planned"


def test_a_gradient_of_the_stacked_parameter_itself_counts():
    torch.manual_seed(0)
    array = hocket.fuse([Depth(depth).to(D) for depth in (1, 2)], shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=0.5)
    unread = dict(array.named_parameters())["fused.layers.1.weight"]
    before = unread.detach().clone()
    (array(torch.randn(6, 4, dtype=D)).sum() + unread.square().sum()).backward()
    optimizer.step()
    assert_close(unread[0].detach(), before[0] - 0.5 * 2 * before[0], "the penalty's gradient alone")
