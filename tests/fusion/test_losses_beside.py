"""`array.losses` beside what must not notice it: other models, buffers and random numbers, parameters that change."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.losses import GO, OPTIMIZERS, D, Runs, X, Y, linears, plain, twin_of
from tests.fusion.nets import NETS, Residual
from tests.fusion.oracle import assert_close, made
from tests.fusion.prefer import ALL, in_one_go, prefer, ways, winner
from torch import nn
from torch.nn import functional as F

import hocket
from quick import covering

# ------------------------------------------------------------------------------------------ isolation


def trained(array, x, y, steps=2):
    found = []
    for _ in range(steps):
        array.zero_grad()
        losses = array.losses(F.cross_entropy, x, y)
        losses.backward()
        with torch.no_grad():
            for parameter in array.parameters():
                parameter -= 0.1 * parameter.grad
        found.append(plain(losses))
    return torch.stack(found, 1), [p.grad.clone() for p in array.parameters()], array.state_dict()


BACKENDS = ["rule", "vmap", "loop"]


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("spoilt", ["weights", "a weight", "targets", "inputs"])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] if way == ALL or name == "words" else [])
        for name in ("residual", "mlp", "words")
        for way in ways(images=name == "residual")
    ]
    + covering(NETS, BACKENDS),
)
def test_a_spoilt_model_leaves_the_others_bit_identical(name, way, spoilt, monkeypatch):
    backend = way if way in BACKENDS else "auto"
    prefer(monkeypatch, way)
    make, given = NETS[name]
    models, x = made(make, 4), torch.stack([given() for _ in range(4)])
    y = torch.rand(4, *models[0](x[0]).shape, dtype=D)  # shares of classes
    models = made(make, 4)  # that call moved running statistics
    expected = trained(hocket.fuse(copy.deepcopy(models), backend=backend, shared=False), x, y)
    x, y = x.clone(), y.clone()
    if spoilt == "weights":
        for parameter in models[2].parameters():
            parameter.data.fill_(torch.nan)
    elif spoilt == "a weight":
        next(models[2].parameters()).data.mul_(3.0)
    elif spoilt == "targets":
        y[2] = torch.inf
    elif x.is_floating_point():
        x[2] = torch.nan
    else:
        x[2] = x[2].flip(0)
    array = hocket.fuse(models, backend=backend, shared=False)
    found = trained(array, x, y)
    assert way == backend or winner(array) == way
    keep = [0, 1, 3]
    assert torch.equal(found[0][keep], expected[0][keep])
    assert not torch.equal(found[0], expected[0]), "what was spoilt must show"
    for one, two in zip(found[1], expected[1], strict=True):
        assert torch.equal(one[keep], two[keep])
    for key, tensor in expected[2].items():
        if not key.startswith("2."):
            assert torch.equal(found[2][key], tensor), key


# ---------------------------------------------------------------- what the contest leaves, what it does not


class Counts(nn.Module):
    """A loss with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, out, target):
        self.calls += 1
        return F.cross_entropy(out, target)


@pytest.mark.filterwarnings("ignore:hocket.fuse. loss")
@pytest.mark.parametrize("way", ways(images=True))
def test_each_call_leaves_the_trace_of_one_call(way, monkeypatch):
    prefer(monkeypatch, way)
    models = made(lambda: nn.Sequential(Residual(), nn.Dropout(0.5)), 4)
    array = hocket.fuse(models, shared=True)
    x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
    before = {name: p.detach().clone() for name, p in array.named_parameters()}
    counts = Counts()
    states = []
    for _ in range(3):
        torch.manual_seed(7)
        losses = array.losses(counts, x, y)
        states.append((torch.get_rng_state(), int(counts.calls), plain(losses)))
        assert all(p.grad is None for p in array.parameters())
        assert all(torch.equal(p.detach(), before[name]) for name, p in array.named_parameters())
    assert array.get_buffer("fused.0.norm.num_batches_tracked").tolist() == [3] * 4
    assert states[0][1] == 4, "a call for each model"
    if way != ALL:
        assert torch.equal(states[0][0], states[1][0]), "as many random numbers as the plain models draw"
    assert torch.equal(states[1][0], states[2][0]), "as many random numbers as a call draws"
    assert states[2][1] - states[1][1] == states[1][1] - states[0][1], "as many calls of the loss"
    assert torch.equal(states[1][2], states[2][2]), "the same dropout, and batch norm in training forgets"
    for model in models:
        for _ in range(3):
            model(x)
    assert_close(array.state_dict()["3.0.norm.running_var"], models[3][0].norm.running_var, "running_var")
    assert winner(array) == way


def test_without_seeds_every_model_has_its_own_draw(monkeypatch):
    prefer(monkeypatch, GO)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5))
    array = hocket.fuse([copy.deepcopy(model).double() for _ in range(3)], shared=True)
    losses = array.losses(lambda out: out.sum(), X)
    again = array.losses(lambda out: out.sum(), X)
    assert in_one_go(array)
    assert len({*plain(losses).tolist(), *plain(again).tolist()}) == 6


class Partly(nn.Module):
    """A layer that is never called, one that is frozen, tied weights, large and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.table = nn.Linear(8, 17_000, bias=False)  # more than a MiB of one model in float64
        self.back = nn.Linear(17_000, 8, bias=False)
        self.back.weight = nn.Parameter(self.table.weight.detach().t().contiguous())
        self.tied = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.back(torch.tanh(self.table(self.frozen(x))))
        return self.head(self.again(torch.tanh(self.tied(x))))


@pytest.mark.parametrize("way", ways(images=False))
def test_frozen_unused_tied_large_and_small_parameters(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Partly, 4), shared=True)
    for number in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4):
        for each in (runs.array.fused, *runs.models):
            each.get_submodule("frozen").requires_grad_(number in (1, 3))  # on and off in mid-training
            each.get_submodule("head").requires_grad_(number != 2)
            each.get_submodule("table").requires_grad_(number != 3)
        runs.step(F.cross_entropy, X, (Y,))
        grads = {name: p.grad is not None for name, p in runs.array.named_parameters()}
        assert not grads["fused.unused.weight"]
        assert grads["fused.frozen.weight"] is (number in (1, 3))
        assert grads["fused.head.weight"] is (number != 2)
        assert grads["fused.table.weight"] is (number != 3)
        assert grads["fused.tied.weight"]
    assert winner(runs.array) == way


@pytest.mark.parametrize("way", [ALL, GO])
def test_large_parameters_only(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(lambda: nn.Sequential(nn.Linear(370, 370, bias=False), nn.Tanh()), 3), shared=True)
    for _ in range(3):
        x, y = torch.randn(4, 370, dtype=D), torch.randn(4, 370, dtype=D)
        runs.step(F.mse_loss, x, (y,))
    assert winner(runs.array) == way


@pytest.mark.parametrize("way", [ALL, GO])
def test_losses_of_what_does_not_train(way, monkeypatch):
    """All that the loss reaches is frozen, and something else is not."""
    prefer(monkeypatch, way)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    array = hocket.fuse(made(Net, 3), shared=True)
    array(X)
    expected = plain(array.losses(F.cross_entropy, X, Y))
    array.fused.get_submodule("used").requires_grad_(False)
    for _ in range(2):
        losses = array.losses(F.cross_entropy, X, Y)
        assert torch.allclose(plain(losses), expected, rtol=1e-12)
        assert not losses.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        losses.backward()
    array.requires_grad_(False)
    assert torch.allclose(plain(array.losses(F.cross_entropy, X, Y)), expected, rtol=1e-12)
    array.requires_grad_(True)
    for _ in range(2):
        array.zero_grad()
        array.losses(F.cross_entropy, X, Y).backward()
    assert array.get_parameter("fused.used.weight").grad is not None
    assert array.get_parameter("fused.unused.weight").grad is None


# ------------------------------------------------------------------------ what becomes of the parameters


def replaced(runs: Runs) -> None:
    for index, model in enumerate(runs.models):
        for name, parameter in model.named_parameters():
            parameter.data = torch.randn_like(parameter)
            whole = runs.array._store.tensor(name).tensor
            if not index:
                whole.data = whole.data.clone()
            whole.data[index] = parameter.data


def loaded(runs: Runs) -> None:
    others = linears(len(runs.models) + 1)[1:]
    for model, other in zip(runs.models, others, strict=True):
        model.load_state_dict(other.state_dict())
    runs.array.load_state_dict(nn.ModuleList(others).state_dict())


def dropped(runs: Runs) -> None:
    runs.array.drop(1)
    runs.optimizer.drop(1)
    del runs.models[1], runs.alone[1]


def refilled(runs: Runs) -> None:
    runs.array.refill(1, copy.deepcopy(linears(5)[4]))
    runs.optimizer.refill(1)
    runs.models[1] = copy.deepcopy(linears(5)[4])
    runs.alone[1] = OPTIMIZERS["SGD"][1](runs.models[1].parameters(), 1)


def moved(runs: Runs) -> None:
    """To another type and back, which is a change of all tensors."""
    for each in (runs.array, *runs.models):
        each.float().double()


CHANGES = {each.__name__: each for each in (replaced, loaded, dropped, refilled, moved)}


@pytest.mark.parametrize("way", [ALL, GO])
@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_change(name, way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(linears(4), shared=True)
    for number in range(4):
        if number == 2:
            CHANGES[name](runs)
        runs.step(F.cross_entropy, X, (Y,))


@pytest.mark.parametrize("way", [ALL, GO, "rule", "partly"])
@pytest.mark.parametrize("how", ["copied", "saved"])
def test_a_copy_goes_its_own_way(how, way, monkeypatch):
    prefer(monkeypatch, way)
    options = {"rule": {"backend": "rule"}, "partly": {"separate": ["block"]}}.get(way, {})
    array = hocket.fuse(made(Residual, 3), shared=True, **options)
    x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
    array.losses(F.cross_entropy, x, y)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    twin = twin_of(array, how)
    twin.losses(F.cross_entropy, x, y)  # recorded, as the original is
    twin.load_state_dict(before)
    found = trained(twin, x, y)
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, before[name]), "the original stays as it was"
    assert all(p.grad is None for p in array.parameters())
    expected = trained(array, x, y)
    assert torch.equal(found[0], expected[0])
    for name, tensor in expected[2].items():
        assert torch.equal(found[2][name], tensor), name
