"""`array.losses` where gradients go further than the parameters, or are watched; and its errors."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.fusion.losses import GO, D, Runs, X, Y, linears, ordinary, pair, plain, same_gradients
from tests.fusion.nets import NETS, mlp
from tests.fusion.oracle import assert_close, made
from tests.fusion.prefer import ALL, in_one_go, prefer, winner
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError
from hocket.fusion.contest import HANDICAP
from hocket.fusion.rules import base
from support.refusals import refused


def test_inputs_and_targets_that_want_gradients_get_them(monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.mse_loss, X, torch.zeros(4, 3, dtype=D))
    for what in ("input", "target"):
        grads = []
        for each in (array, other):
            x, y = X.clone(), torch.zeros(4, 3, dtype=D)
            (x if what == "input" else y).requires_grad_()
            each.zero_grad()
            losses = each.losses(F.mse_loss, x, y) if each is array else ordinary(each, F.mse_loss, x, y)
            losses.backward()
            grads.append((x if what == "input" else y).grad)
        assert_close(grads[0], grads[1], what)
        same_gradients(array, other)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3, dtype=D))

    def forward(self, out, y):
        return F.cross_entropy(out * self.log.exp(), y)


def closed_over(loss: nn.Module) -> Any:
    return lambda out, y: loss(out, y)


class Holder:
    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, out, y):
        return self.loss(out, y)


FNS = {
    "a module": lambda loss: loss,
    "a method": lambda loss: loss.forward,
    "a closure": closed_over,
    "a partial": lambda loss: partial(lambda out, y, by: by(out, y), by=loss),
    "a default": lambda loss: lambda out, y, by=loss: by(out, y),
}


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "from the second step on"])
@pytest.mark.parametrize("name", FNS)
def test_a_loss_with_parameters_of_its_own_gets_its_gradients(name, late, monkeypatch):
    array, other = pair(monkeypatch)
    losses = [Temperature().requires_grad_(not late) for _ in range(2)]
    array.losses(FNS[name](losses[0]), X, Y)
    assert in_one_go(array) is late
    for each, loss in zip((array, other), losses, strict=True):
        loss.requires_grad_(True)
        fn = FNS[name](loss)
        (each.losses(fn, X, Y) if each is array else ordinary(each, fn)).backward()
    assert_close(losses[0].log.grad, losses[1].log.grad, "the loss's own gradient")
    same_gradients(array, other)


def test_a_gradient_that_would_be_lost_is_an_error(monkeypatch):
    """An object's loss is seen to train only when it is called."""
    array, _ = pair(monkeypatch)
    loss = Temperature().requires_grad_(False)
    array.losses(Holder(loss), X, Y)
    assert in_one_go(array)
    loss.requires_grad_()
    refused(r"would be lost; use array\.loss", array.losses, Holder(loss), X, Y)


def test_a_loss_of_the_stacked_parameters_themselves(monkeypatch):
    array, other = pair(monkeypatch)

    def penalised(each):
        return lambda out, y: F.cross_entropy(out, y) + each.get_parameter("fused.0.weight").square().sum()

    array.losses(penalised(array), X, Y).backward()
    ordinary(other, penalised(other)).backward()
    same_gradients(array, other)


def test_blocks_that_stay_separate(monkeypatch):
    array, other = pair(monkeypatch, separate=["2"])
    for each in (array, other):
        (each.losses(F.cross_entropy, X, Y) if each is array else ordinary(each)).backward()
    assert all(not choice.winner.per_group_backward for choice in array.choices)
    assert array.separate[0][1].weight.grad is not None
    same_gradients(array, other)


def test_half_precision(monkeypatch):
    array, _ = pair(monkeypatch)
    array.half().losses(F.mse_loss, X.half(), torch.zeros(4, 3).half()).backward()
    assert all(p.grad.dtype == torch.float16 for p in array.parameters())
    array.float()
    with torch.autocast("cpu", torch.float16):
        array.losses(F.mse_loss, X.float(), torch.zeros(4, 3)).backward()
    assert all(not choice.winner.per_group_backward for choice in array.choices)


def test_transforms_around(monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    found = torch.func.grad(lambda x: array.losses(F.cross_entropy, x, Y).sum())(X)
    expected = torch.func.grad(lambda x: ordinary(other, x=x).sum())(X)
    assert_close(found, expected, "torch.func.grad")
    xs = torch.stack([X, 2 * X])
    found = torch.vmap(lambda x: array.losses(F.cross_entropy, x, Y).as_subclass(Tensor))(xs)
    for index, x in enumerate(xs):
        assert_close(found[index].detach(), plain(ordinary(other, x=x)), "torch.vmap")
    found.sum().backward()
    sum(ordinary(other, x=x) for x in xs).sum().backward()
    same_gradients(array, other)


def test_hooks_on_parameters_run_at_the_backward(monkeypatch):
    array, other = pair(monkeypatch)
    losses = array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    del losses
    first, second = (each.get_parameter("fused.0.weight") for each in (array, other))
    for parameter in (first, second):
        parameter.register_hook(lambda grad: grad * 3)
    seen = []
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    losses = array.losses(F.cross_entropy, X, Y)
    assert not seen, "not before losses.backward()"
    losses.backward()
    ordinary(other).backward()
    same_gradients(array, other)
    assert len(seen) == 1
    assert torch.equal(seen[0], first.grad)


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "global"])
def test_hooks_on_the_array_run(kind, monkeypatch):
    array, _ = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    seen: list[int] = []
    handle = {
        "forward": lambda: array.register_forward_hook(lambda *_: seen.append(1)),
        "forward pre": lambda: array.register_forward_pre_hook(lambda *_: seen.append(1)),
        "backward": lambda: array.register_full_backward_hook(lambda *_: seen.append(1)),
        "global": lambda: nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(1) if module is array else None
        ),
    }[kind]()
    try:
        with pytest.warns(UserWarning, match="Full backward hook is firing") if kind == "backward" else nullcontext():
            array.losses(F.cross_entropy, X, Y).backward()
        assert seen == [1]
    finally:
        handle.remove()


@pytest.mark.parametrize("way", [ALL, GO])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_under_autocast_as_plain_models_under_autocast(name, way, monkeypatch):
    """To bfloat16's rounding, as the tests of the forward under autocast."""
    prefer(monkeypatch, way)
    make, given = NETS[name]
    models = [model.float() for model in made(make, 4)]
    array = hocket.fuse(copy.deepcopy(models), shared=True)
    x, y = given().float(), torch.tensor([0, 1, 2, 3])
    for _ in range(2):
        array.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = array.losses(F.cross_entropy, x, y)
        losses.backward()
        for index, model in enumerate(models):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            assert losses.dtype == loss.dtype == torch.float32
            assert abs(losses[index].item() - loss.item()) <= 0.05 * abs(loss.item())
            weight = "head.weight" if name == "residual" else "3.weight"
            own, expected = array._store.tensor(weight).tensor.grad[index], model.get_parameter(weight).grad
            assert own.dtype == expected.dtype == torch.float32
            assert (own - expected).abs().max() <= 0.05 * expected.abs().max()
    assert winner(array) == way


# --------------------------------------------------------------------------------------------- errors


def test_errors_name_shapes_before_and_after_a_choice(monkeypatch):
    array, other = pair(monkeypatch)
    far = torch.full((4,), 7)
    refused(r"loss: .* \(4, 3\), \(4,\), model 0: Target 7 is out of bounds", array.losses, F.cross_entropy, X, far)
    array.losses(F.cross_entropy, X, Y)
    assert winner(array, 0) == GO
    refused(r"loss: .* \(4, 3\), \(4,\), model 0: Target 7 is out of bounds", array.losses, F.cross_entropy, X, far)
    own = Y.expand(3, 4).clone()
    array.losses(F.cross_entropy, X, own)
    own[2, 1] = 7
    refused(r"loss: .* \(4, 3\), \(4,\), model 2: Target 7 is out of bounds", array.losses, F.cross_entropy, X, own)
    with pytest.raises(InputError, match=r"loss: .* \(4, 3\), \(5,\), model 0: .*batch_size"):
        array.losses(F.cross_entropy, X, torch.zeros(5, dtype=torch.int64))
    refused(r"layer 0: linear", array.losses, F.cross_entropy, torch.ones(4, 5, dtype=D), Y)
    array.losses(F.cross_entropy, X, Y).backward()  # and it goes on as if nothing had been
    ordinary(other).backward()
    same_gradients(array, other)


@pytest.mark.filterwarnings("ignore:hocket.fuse. Sequential. layer 1. tanh.* no such view")
def test_an_op_that_only_the_plain_models_compute(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such view")

    monkeypatch.setitem(base._OPS, "tanh", broken)
    prefer(monkeypatch)
    runs = Runs(linears(), shared=True)
    for _ in range(3):
        runs.step(F.cross_entropy, X, (Y,))


def test_all_at_once_names_shapes_too(monkeypatch):
    array, _ = pair(monkeypatch, ALL, make=lambda: linears(4))
    array.losses(F.cross_entropy, X, Y)
    assert not in_one_go(array)
    with pytest.raises(InputError, match=r"loss: .* \(4, 4, 3\), \(4,\), 4 models: Target 7 is out of bounds"):
        array.losses(F.cross_entropy, X, torch.full((4,), 7))


@pytest.mark.parametrize("inputs", [[X], X.numpy(), None, 3])
def test_inputs_of_another_kind_are_refused(inputs):
    array = hocket.fuse(linears())
    refused(f"a dict of named ones, got {type(inputs).__name__}", array.losses, F.cross_entropy, inputs, Y)


@pytest.mark.parametrize("way", [ALL, GO])
def test_a_loss_that_gives_no_tensor(way, monkeypatch):
    array, _ = pair(monkeypatch, way)
    answers: list[Any] = []

    def fn(out, y):
        return answers[-1] if answers else F.cross_entropy(out, y)

    array.losses(fn, X, Y)
    answers.append("none")
    refused("loss: expected one tensor from the loss function, got str", array.losses, fn, X, Y)


@pytest.mark.parametrize(("num_models", "backend"), [(1, "auto"), (3, "rule"), (3, "vmap"), (3, "loop")])
def test_one_model_and_other_backends_go_the_ordinary_way(num_models, backend):
    runs = Runs(made(mlp, num_models), backend=backend, shared=True)
    for _ in range(2):
        runs.step(F.cross_entropy, X, (Y,))
    assert bool(runs.array.choices) is (backend == "auto")
    assert all(not choice.winner.per_group_backward for choice in runs.array.choices)


def test_the_real_contest_times_all_and_keeps_what_won():
    runs = Runs(linears(4), shared=True)
    for _ in range(24):
        runs.step(F.cross_entropy, X, (Y,))
    [choice] = runs.array.choices
    assert {str(plan) for plan in choice.times_us} == {"4 at a time", GO}
    assert choice.times_us[choice.winner] <= HANDICAP * min(choice.times_us.values())
