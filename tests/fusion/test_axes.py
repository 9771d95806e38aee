"""Which axis is the models': settled once, held from then on, and asked for where nothing settles it."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import assert_close, made
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError

D = torch.float64


def linears(num_models: int = 8) -> list[nn.Module]:
    return made(lambda: nn.Linear(6, 3), num_models)


def assert_shared(array, models, x) -> None:
    out = array(x)
    for index, model in enumerate(models):
        assert_close(out[index], model(x), "output")


def test_a_shorter_last_batch_is_read_as_those_before_it():
    models = linears()
    array = hocket.fuse(models)
    for size in (16, 16, 8, 3, 8):
        assert_shared(array, models, torch.randn(size, 5, 6, dtype=D))
    own = torch.randn(8, 4, 5, 6, dtype=D)
    for _ in range(2):
        out = array(own)
    for index, model in enumerate(models):
        assert_close(out[index], model(own[index]), "output")


def test_losses_of_a_shorter_last_batch_are_those_of_plain_models():
    models = linears()
    array = hocket.fuse(models, backend="rule")
    for size in (16, 8):
        x, y = torch.randn(size, 5, 6, dtype=D), torch.randn(size, 5, 3, dtype=D)
        for losses in (array.losses(F.mse_loss, x, y), array.loss(F.mse_loss, array(x), y)):
            for index, model in enumerate(models):
                assert_close(losses[index].as_subclass(torch.Tensor).detach(), F.mse_loss(model(x), y).detach(), "loss")


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
    with pytest.raises(InputError, match="no reading runs on tensors without data"):
        hocket.fuse([Sums() for _ in range(4)])(torch.randn(4, 6))


def test_what_only_works_in_one_way_is_not_asked_for():
    models = made(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)), 4)
    array = hocket.fuse(models, backend="rule")
    assert array(torch.randn(4, 3, 4, 4, dtype=D)).shape == (4, 4, 2), "four images, one batch for all"
    assert hocket.fuse(models, backend="rule")(torch.randn(4, 4, 3, 4, 4, dtype=D)).shape == (4, 4, 2)
    assert_shared(hocket.fuse(linears(4), backend="rule"), linears(4), torch.randn(4, 6, dtype=D))


def test_both_ranks_in_use_leave_a_call_open():
    array = hocket.fuse(linears(4), backend="rule")
    array(torch.randn(5, 6, dtype=D))
    array(torch.randn(7, 5, 6, dtype=D))
    with pytest.raises(InputError, match="of all 4 models, or of each"):
        array(torch.randn(4, 5, 6, dtype=D))


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
        out = array(x, mask)
        for index, model in enumerate(models):
            assert_close(out[index], model(x[index], mask), "output")
    with pytest.raises(InputError, match="shared: no argument is called 'y'; there are x, mask"):
        hocket.fuse(models, shared={"y": True})(x, mask)


def per_sample(out, y):
    return ((out - y) ** 2).sum()


@pytest.mark.parametrize("shared", [True, False])
def test_targets_follow_what_was_said(shared):
    """(N, N) with N = B: one for all models, or N numbers for each."""
    models = made(lambda: nn.Linear(6, 4), 4)
    array = hocket.fuse(models, backend="rule", shared=shared)
    x, y = torch.randn(*([] if shared else [4]), 4, 6, dtype=D), torch.randn(4, 4, dtype=D)
    losses = array.loss(per_sample, array(x), y)
    for index, model in enumerate(models):
        expected = per_sample(model(x if shared else x[index]), y if shared else y[index])
        assert_close(losses[index].as_subclass(torch.Tensor).detach(), expected.detach(), "loss")


def test_targets_that_nothing_settles_are_asked_for():
    array = hocket.fuse(made(lambda: nn.Linear(6, 4), 4), backend="rule")
    out = array(torch.randn(4, 6, dtype=D))
    with pytest.raises(InputError, match=r"loss: target of shape \(4, 4\), output \(4, 4, 4\)"):
        array.loss(per_sample, out, torch.randn(4, 4, dtype=D))


def test_a_target_that_the_loss_takes_in_one_way_only_is_settled_by_that():
    models = made(lambda: nn.Linear(6, 3), 4)
    array = hocket.fuse(models, backend="rule")
    x, y = torch.randn(4, 6, dtype=D), torch.randint(0, 3, (4, 4))
    losses = array.loss(F.cross_entropy, array(x), y)
    for index, model in enumerate(models):
        expected = F.cross_entropy(model(x), y[index]).detach()
        assert_close(losses[index].as_subclass(torch.Tensor).detach(), expected, "loss")


def test_weights_of_each_model_stay_that_when_the_batch_is_as_long_as_the_array():
    def weighted(out, y, weight):
        return F.mse_loss(out, y) * weight.sum()

    models = made(lambda: nn.Linear(6, 3), 4)
    array = hocket.fuse(models, backend="rule")
    weights = torch.rand(4, dtype=D)
    for size in (7, 4):
        x, y = torch.randn(size, 6, dtype=D), torch.randn(size, 3, dtype=D)
        losses = array.loss(weighted, array(x), y, weights)
        for index, model in enumerate(models):
            expected = weighted(model(x), y, weights[index]).detach()
            assert_close(losses[index].as_subclass(torch.Tensor).detach(), expected, "loss")
