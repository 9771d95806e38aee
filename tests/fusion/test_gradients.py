"""Parts of stacked parameters, the way of their gradients back, and models that have none of a parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.oracle import assert_close, assert_same_parameters, made
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion.gradients import Parts

pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


D = torch.float64


def _parts(whole):
    return [own["weight"] for own in Parts().of({"weight": whole})]


def test_gradients_can_be_differentiated_again():
    whole = nn.Parameter(torch.arange(1.0, 7.0).view(6, 1))
    loss = sum((part**3).sum() for part in _parts(whole))
    [grad] = torch.autograd.grad(loss, [whole], create_graph=True)
    grad.sum().backward()
    assert torch.equal(whole.grad, 6 * whole.detach())


def test_a_gradient_is_handed_over_without_a_copy():
    weight = nn.Parameter(torch.ones(1, 4))
    [own] = _parts(weight)
    seen = []
    (own * 2).register_hook(lambda grad: None)
    own.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (own * torch.arange(4.0)).sum().backward()
    assert seen == [weight.grad.data_ptr()]


@pytest.mark.parametrize("backend", ["auto", "rule", "vmap", "loop"])
@pytest.mark.parametrize("num_models", [1, 3])
def test_an_update_between_forward_and_backward_is_an_error(num_models, backend):
    models = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), num_models)
    array = hocket.fuse(models, backend=backend, shared=True)
    for _ in range(3):
        loss = array(torch.randn(5, 3, dtype=D)).sum()
        with torch.no_grad():
            for parameter in array.parameters():
                parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


RATES = [0.01, 0.02, 0.03]


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
    assert_same_parameters(array, plain)
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


@pytest.mark.filterwarnings("ignore:hocket.fuse. Sparing")
def test_a_part_that_is_left_out_now_and_again_counts_its_own_steps():
    class Sparing(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, takes):
            return self.always(x) + (self.sometimes(x) if takes else 0)

    models = made(Sparing, 2)
    array = hocket.fuse(models, shared={"x": True, "takes": False})
    optimizer = hocket.optim.Adam(array.parameters(), lr=0.1)
    alone = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for takes in ([True, True], [True, True], [False, True], [True, False], [True, True], [True, True]):
        x = torch.randn(5, 4, dtype=D)
        optimizer.zero_grad()
        array(x, torch.tensor(takes)).square().sum().backward()
        optimizer.step()
        for model, own, takes_part in zip(models, alone, takes, strict=True):
            own.zero_grad()
            model(x, takes_part).square().sum().backward()
            own.step()
    assert_same_parameters(array, models)
