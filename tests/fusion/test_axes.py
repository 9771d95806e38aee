"""The axis of the models: settled once, kept from then on, and asked for where nothing settles it."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.fusion.oracle import assert_each, made
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError
from support.refusals import refused

D = torch.float64


def linears(num_models: int = 8) -> list[nn.Module]:
    return made(lambda: nn.Linear(6, 3), num_models)


def test_a_shorter_last_batch_is_read_as_those_before_it():
    models = linears()
    array = hocket.fuse(models)
    for size in (16, 16, 8, 3, 8):
        x = torch.randn(size, 5, 6, dtype=D)
        assert_each(array(x), [model(x) for model in models])
    own = torch.randn(8, 4, 5, 6, dtype=D)
    for _ in range(2):
        assert_each(array(own), [model(x) for model, x in zip(models, own, strict=True)])


def test_losses_of_a_shorter_last_batch_are_those_of_plain_models():
    models = linears()
    array = hocket.fuse(models, backend="rule")
    for size in (16, 8):
        x, y = torch.randn(size, 5, 6, dtype=D), torch.randn(size, 5, 3, dtype=D)
        for losses in (array.losses(F.mse_loss, x, y), array.loss(F.mse_loss, array(x), y)):
            assert_each(losses, [F.mse_loss(model(x), y) for model in models])


@pytest.mark.parametrize("backend", ["auto", "rule", "vmap", "loop"])
def test_a_first_call_that_settles_nothing_asks(backend):
    with pytest.raises(InputError, match=r"input of shape \(8, 5, 6\): of all 8 models, or of each\?.*shared=True"):
        hocket.fuse(linears(), backend=backend)(torch.randn(8, 5, 6, dtype=D))


class Sums(nn.Module):
    """Looks at values, so nothing is known of its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x @ self.fc.weight.T


def test_a_net_that_nobody_can_trace_asks_too():
    refused("no reading runs on tensors without data", hocket.fuse([Sums() for _ in range(4)]), torch.randn(4, 6))


def test_what_only_works_in_one_way_is_not_asked_for():
    models = made(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)), 4)
    array = hocket.fuse(models, backend="rule")
    assert array(torch.randn(4, 3, 4, 4, dtype=D)).shape == (4, 4, 2), "four images, one batch for all"
    assert hocket.fuse(models, backend="rule")(torch.randn(4, 4, 3, 4, 4, dtype=D)).shape == (4, 4, 2)
    models, x = linears(4), torch.randn(4, 6, dtype=D)
    assert_each(hocket.fuse(models, backend="rule")(x), [model(x) for model in models])


def test_both_ranks_in_use_leave_a_call_open():
    array = hocket.fuse(linears(4), backend="rule")
    array(torch.randn(5, 6, dtype=D))
    array(torch.randn(7, 5, 6, dtype=D))
    refused("of all 4 models, or of each", array, torch.randn(4, 5, 6, dtype=D))


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x, mask):
        return self.fc(x * mask)


def test_arguments_can_be_named():
    models = made(Two, 4)
    x, mask = torch.randn(4, 5, 6, dtype=D), torch.rand(4, 5, 6, dtype=D)[0]
    array = hocket.fuse(models, shared={"x": False, "mask": True})
    for _ in range(2):
        assert_each(array(x, mask), [model(own, mask) for model, own in zip(models, x, strict=True)])
    refused("shared: no argument is called 'y'; there are x, mask", hocket.fuse(models, shared={"y": True}), x, mask)


def per_sample(out, y):
    return ((out - y) ** 2).sum()


@pytest.mark.parametrize("shared", [True, False])
def test_targets_follow_what_was_said(shared):
    """(N, N) with N = B: one for all models, or N numbers for each."""
    models = made(lambda: nn.Linear(6, 4), 4)
    array = hocket.fuse(models, backend="rule", shared=shared)
    x, y = torch.randn(*([] if shared else [4]), 4, 6, dtype=D), torch.randn(4, 4, dtype=D)
    losses = array.loss(per_sample, array(x), y)
    given = [(x, y)] * 4 if shared else zip(x, y, strict=True)
    assert_each(losses, [per_sample(model(x), y) for model, (x, y) in zip(models, given, strict=True)])


def test_targets_that_nothing_settles_are_asked_for():
    array = hocket.fuse(made(lambda: nn.Linear(6, 4), 4), backend="rule")
    out = array(torch.randn(4, 6, dtype=D))
    with pytest.raises(InputError, match=r"loss: target of shape \(4, 4\), output \(4, 4, 4\)"):
        array.loss(per_sample, out, torch.randn(4, 4, dtype=D))


def test_a_target_that_the_loss_takes_in_one_way_only_is_settled_by_that():
    models = made(lambda: nn.Linear(6, 3), 4)
    array = hocket.fuse(models, backend="rule")
    x, y = torch.randn(4, 6, dtype=D), torch.randint(0, 3, (4, 4))
    expected = [F.cross_entropy(model(x), own) for model, own in zip(models, y, strict=True)]
    assert_each(array.loss(F.cross_entropy, array(x), y), expected)


def test_weights_of_each_model_stay_that_when_the_batch_is_as_long_as_the_array():
    def weighted(out, y, weight):
        return F.mse_loss(out, y) * weight.sum()

    models = made(lambda: nn.Linear(6, 3), 4)
    array = hocket.fuse(models, backend="rule")
    weights = torch.rand(4, dtype=D)
    for size in (7, 4):
        x, y = torch.randn(size, 6, dtype=D), torch.randn(size, 3, dtype=D)
        expected = [weighted(model(x), y, weight) for model, weight in zip(models, weights, strict=True)]
        assert_each(array.loss(weighted, array(x), y, weights), expected)


def test_weights_of_classes_as_many_as_models_are_said_to_be_read_as_each_models():
    def weighted(out, y, weight):
        return (F.mse_loss(out, y, reduction="none") * weight).mean()

    models = made(lambda: nn.Linear(6, 3), 3)
    x, y, weight = torch.randn(7, 6, dtype=D), torch.randn(7, 3, dtype=D), torch.rand(3, dtype=D)
    array = hocket.fuse(models, backend="rule", shared=True)
    with pytest.warns(UserWarning, match=r"target of shape \(3,\), output.*read as one of each of 3 models"):
        array.losses(weighted, x, y, weight)
    for_all = functools.partial(weighted, weight=weight)
    assert_each(array.losses(for_all, x, y), [weighted(model(x), y, weight) for model in models])


def test_boxes_of_a_batch_as_many_as_models_are_of_all_models():
    def nearest(out, boxes):
        return sum((out[:, None] - each[None]).abs().sum(-1).min(1)[0].mean() + each[0, 0] for each in boxes)

    for num_models in (1, 4):
        models = made(lambda: nn.Linear(6, 3), num_models)
        array = hocket.fuse(models, shared=True)
        for counts in ((4, 1), (1, 4), (2, 3)):
            x, boxes = torch.randn(5, 6, dtype=D), [torch.rand(count, 3, dtype=D) for count in counts]
            expected = [nearest(model(x), boxes) for model in models]
            assert_each(array.losses(nearest, x, boxes), expected)


def test_a_loss_that_fails_by_both_readings_is_told_by_the_first():
    def broken(out, factors):
        return (out * factors[:, 0]).sum()

    array = hocket.fuse(made(lambda: nn.Linear(6, 3), 4), shared=True)
    with pytest.raises(
        InputError, match=r"\(4, 5, 3\), \(4, 2\), 4 models: too many indices for tensor of dimension 1"
    ):
        array.losses(broken, torch.randn(5, 6, dtype=D), torch.randn(4, 2, dtype=D))
