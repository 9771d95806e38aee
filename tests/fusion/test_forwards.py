"""What people write in a forward, and what a tracer may pass over in silence: values changed in place, grad modes."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import check, made
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from quick import covering

BACKENDS = ["rule", "vmap", "loop", "auto"]


class Layer(nn.Module):
    """A linear layer, a buffer, and a function of both and the input."""

    def __init__(self, function) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def alias(m, x):
    x = m.a(x)
    y = x
    y += 1
    y *= m.b.weight[0]
    y -= x.mean()
    y /= 2
    return x + y


def of_the_input(m, x):
    x = x * 1  # shared by all models until here
    y = x
    y += m.b.bias
    return m.a(y)


def into_a_part(m, x):
    x = m.a(x)
    x[:, 1:3] += m.b(x)[:, 1:3].detach()
    x[0] = 0
    return x


def counting(m, x):
    m.seen += 1
    return m.a(x) * m.seen.clone()  # each model's own would do for plain ones; here they are parts of one tensor


def averaging(m, x):
    m.seen = 0.9 * m.seen + 0.1 * x.detach().mean(0)
    return m.a(x - m.seen)


def averaging_without_gradient(m, x):
    with torch.no_grad():
        m.seen = 0.9 * m.seen + 0.1 * m.b(x).mean(0)
    return m.a(x - m.seen)


def copying(m, x):
    m.seen.copy_(x.detach().mean(0))
    return m.a(x) + m.seen


def without_gradient(m, x):
    with torch.no_grad():
        target = m.b(x)
    return m.a(x) * target


def checkpointed(m, x, use_reentrant=False):
    x = m.a(x)
    return x + checkpoint(lambda hidden: torch.tanh(m.b(hidden)), x, use_reentrant=use_reentrant)


def checkpointed_from_within(m, x):
    return checkpointed(m, x, use_reentrant=True)


def checkpointed_on_a_branch(m, x):
    return checkpointed(m, x, use_reentrant=True) if x.sum() < 1e9 else x  # no tracer follows values


def by_its_own_flag(m, x):
    return m.a(x) * (2 if m.b.training else 1)


FORWARDS = [checkpointed, checkpointed_from_within, checkpointed_on_a_branch]
FORWARDS += [alias, of_the_input, into_a_part, counting, averaging, averaging_without_gradient, copying]
FORWARDS += [without_gradient]


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize(("backend", "shared"), covering(BACKENDS, [True, False]))
@pytest.mark.parametrize("function", FORWARDS)
def test_a_forward_does_in_fused_models_what_it_does_alone(function, backend, shared):
    x = torch.randn((5, 4) if shared else (3, 5, 4)).double()
    check(made(lambda: Layer(function), 3), x, shared=shared, backend=backend, steps=3)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_first_call_without_gradients_does_not_hide_a_part_that_never_has_any(backend):
    models = made(lambda: Layer(without_gradient), 2)
    array = hocket.fuse(models, backend=backend, shared=True)
    x = torch.randn(5, 4).double()
    with torch.inference_mode():
        array(x)
    with torch.no_grad():
        array(x)
    for _ in range(2):
        array.zero_grad()
        array(x).sum().backward()
    assert array._store.tensor("b.weight").tensor.grad is None
    for index, model in enumerate(models):
        model(x).sum().backward()
        assert torch.allclose(array._store.tensor("a.weight").tensor.grad[index], model.a.weight.grad, rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_was_not_in_training_is_so_after_train(backend):
    models = made(lambda: Layer(by_its_own_flag), 2)
    for model in models:
        model.b.eval()
    array = hocket.fuse(models, backend=backend, shared=True)
    x = torch.randn(5, 4).double()
    for mode in (None, True, False, True):
        if mode is not None:
            for each in (array, *models):
                each.train(mode)
        for _ in range(2):
            assert torch.allclose(array(x)[1], models[1](x), rtol=1e-12)


class WritesOver(nn.Module):
    """Begins with an activation in place, on the input that it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.LeakyReLU(0.5, inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.first(x))


@pytest.mark.parametrize("num_models", [1, 3])
def test_a_model_that_begins_with_dropout_in_place_can_be_called(num_models):
    models = made(lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 3)), num_models)
    array = hocket.fuse(models, shared=True)
    for _ in range(3):
        x = torch.ones(5, 4).double()
        array.losses(nn.functional.mse_loss, x, torch.zeros(5, 3).double()).backward()
        assert all(p.grad.isfinite().all() for p in array.parameters())
        assert set(x.unique().tolist()) <= {0.0, 1.0, 2.0}, "dropped once at most"


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("way", ["call", "losses"])
def test_a_model_that_writes_over_its_input_does_so_once(way, num_models):
    models = made(WritesOver, num_models)
    x = torch.randn(5, 4).double()
    array = hocket.fuse(models, shared=True)
    y = torch.randn(5, 3).double()
    for _ in range(3):
        given = x.clone()
        array.zero_grad()
        if way == "call":
            array.loss(nn.functional.mse_loss, array(given), y).backward()
        else:
            array.losses(nn.functional.mse_loss, given, y).backward()
        assert torch.equal(given, nn.functional.leaky_relu(x, 0.5))
    for index, model in enumerate(models):
        nn.functional.mse_loss(model(x.clone()), y).backward()
        torch.testing.assert_close(array.get_parameter("fused.fc.weight").grad[index], model.fc.weight.grad)
