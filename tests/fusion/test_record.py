"""Graphs of forwards that run: what they hold, and what none can stand for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from tests.fusion.oracle import assert_close, check, made
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, softmax
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.errors import InputError
from quick import covering

D = torch.float64
BACKENDS = ["rule", "vmap", "loop", "auto"]


class Layer(nn.Module):
    """Runs a function of itself and its input, behind an unpacked shape."""

    def __init__(self, function, number=1.0):
        super().__init__()
        self.function, self.number = function, number
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=D))
        self.table = torch.arange(4.0, dtype=D)  # belongs to no layer

    def forward(self, x):
        rows, columns = x.shape
        assert rows
        assert columns == 4
        return self.function(self, x)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Cube(torch.autograd.Function):
    """Has twice the gradient that its ops have."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 6 * x * x * grad


def reflected(m, x):
    return 2 - m.a(x), 1 / (m.b(x).square() + 1), 2 ** (0.1 * x), 5 * x + 3 // (x.detach().abs() + 1)


def indexed(m, x):
    h = m.a(x)
    return h[:, 1:3], h[torch.tensor([2, 0])], h[..., None], h[h.shape[0] - 1]


def written(m, x):
    h = m.a(x)
    h += 1
    h[:, 0] = x[:, 0]
    h.mul_(m.number)
    return h


def several(m, x):
    values, places = m.a(x).max(1)
    first, second = m.b(x).split(2, dim=1)
    return {
        "values": values,
        "places": places,
        "pair": Pair(first, second),
        "rows": torch.ones(len(x), dtype=x.dtype) + values,
    }


def attributes(m, x):
    return m.a(x).T.mT + x.type(m.b.weight.dtype).data


def table(m, x):
    return m.a(x) * m.table + torch.arange(4, dtype=x.dtype, device=x.device)


def factories(m, x):
    return m.a(x) + torch.zeros_like(x).fill_(m.number) + x.new_ones(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def function(m, x):
    return Cube.apply(m.a(x)) if x.is_floating_point() else x


def iterated(m, x):
    return torch.stack([m.a(row) for row in x])


def averaged(m, x):
    h = m.a(x)
    with torch.no_grad():
        m.mean.lerp_(h.mean(0), 0.1)
        scale = h.abs().max() + 1
    return h / scale + m.mean


def weight_without_gradient(m, x):
    with torch.no_grad():
        fixed = m.b(x)
    return softmax(m.a(x), dim=-1) * fixed + m.b(x)


def written_without_gradient(m, x):
    h = m.a(x)
    with torch.no_grad():
        h.clamp_(min=0)
    return h * 2


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
    m.mean += 1
    return m.a(x) * m.mean.clone()  # each model's own would do for plain ones; here they are parts of one tensor


def averaging(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return m.a(x - m.mean)


def averaging_without_gradient(m, x):
    with torch.no_grad():
        m.mean = 0.9 * m.mean + 0.1 * m.b(x).mean(0)
    return m.a(x - m.mean)


def copying(m, x):
    m.mean.copy_(x.detach().mean(0))
    return m.a(x) + m.mean


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


def penalised(m, x):
    return m.a(x), sum(parameter.square().sum() for parameter in m.parameters())


FOLLOWED = [indexed, written, several, attributes, table, factories, function, iterated, averaged]
FOLLOWED += [weight_without_gradient, written_without_gradient, reflected]
OTHERS = [checkpointed, checkpointed_from_within, checkpointed_on_a_branch, penalised]
OTHERS += [alias, of_the_input, into_a_part, counting, averaging, averaging_without_gradient, copying]
OTHERS += [without_gradient]


@pytest.mark.parametrize("act", FOLLOWED, ids=lambda act: act.__name__)
def test_followed_by_a_graph(act, recwarn):
    check(made(lambda: Layer(act), 3), torch.randn(5, 4, dtype=D), shared=True, backend="rule", steps=3)
    assert not [each for each in recwarn if "hocket.fuse: Layer" in str(each.message)]


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize(("backend", "shared"), covering(BACKENDS, [True, False]))
@pytest.mark.parametrize("act", [*FOLLOWED, *OTHERS], ids=lambda act: act.__name__)
def test_a_forward_does_in_fused_models_what_it_does_alone(act, backend, shared):
    x = torch.randn((5, 4) if shared else (3, 5, 4), dtype=D)
    check(made(lambda: Layer(act), 3), x, shared=shared, backend=backend, steps=3)


def test_numbers_that_differ_are_each_models_own():
    numbers = iter([0.5, 1.0, 2.0])
    check(made(lambda: Layer(written, next(numbers)), 3), torch.randn(5, 4, dtype=D), shared=True, backend="rule")


def test_blocks_stay_separate_behind_shapes():  # with all others around them fused
    models = made(lambda: Layer(written), 3)
    array = hocket.fuse(models, backend="rule", shared=True, separate=["a"])
    x = torch.randn(5, 4, dtype=D)
    out = array(x)
    for index, model in enumerate(array.unfuse()):
        torch.testing.assert_close(out[index], model(x))


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("act", [lambda m, x: m.a(x) + m.a.weight.sum(), lambda m, x: m.a(x) + m.a.weight[x.shape[0]]])
def test_a_parameter_of_a_separate_block_that_is_read_elsewhere(act):
    models = made(lambda: Layer(act), 2)
    array = hocket.fuse(models, backend="rule", shared=True, separate=["a"])
    x = torch.randn(3, 4, dtype=D)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))


def branches(m, x):
    return m.a(x) if x.sum() > 0 else x


def hooks(m, x):
    h = m.a(x)
    h.register_hook(lambda grad: grad * 2)
    return h


def prints(m, x):
    return m.a(x) * len(repr(x))


def lists(m, x):
    return m.a(x) * x.tolist()[0][0]


def asks_for_gradients(m, x):
    return m.a(x) if m.a(x).requires_grad else m.b(x)


def own_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.a(x)


def differentiates(m, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(m.a(x).square().sum(), x)
    return grad


def chooses(m, x):
    return m.a(x)[x > 0].sum()


def catches(m, x):
    try:
        return m.a(x) @ x
    except RuntimeError:
        return m.a(x)


def remembers(m, x):
    m.last = m.a(x)
    return m.last * 2


def reads(name):
    return lambda m, x: m.a(x) * float(getattr(m.a(x).detach().sum(), name)())


def called_thrice(array, x):
    """A reason that may pass has two more tries."""
    for _ in range(3):
        array(x)


def gets_memory(m, x):
    k = x.new_ones(4)
    k.set_(x.new_full((4,), 2.0))
    return m.a(x) * k


def gets_memory_unread(m, x):
    m.mean.set_(m.mean + 1)
    return m.a(x)


def swaps(m, x):
    k, other = x.new_ones(4), x.new_full((4,), 2.0)
    torch.utils.swap_tensors(k, other)
    return m.a(x) * k


def steps_inside(m, x):
    k, options = torch.ones(4, dtype=D), {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([k], [torch.ones(4, dtype=D)], [], weight_decay=0.0, lr=0.5, is_first_step=False, **options)
    return m.a(x) * k


REFUSED = {
    gets_memory: "other memory, by set_",
    swaps: "other memory, by set_ or swap_tensors",
    steps_inside: "_fused_sgd_ writes into tensors",
    branches: "looks at values, by __bool__",
    hooks: "looks at values, by register_hook",
    prints: "looks at values, by __repr__",
    lists: "looks at values, by tolist",
    asks_for_gradients: "looks at the attribute requires_grad of a tensor",
    own_autocast: "an autocast of its own",
    differentiates: "grad is no op",
    chooses: "__getitem__ gives tensors whose shapes depend on values",
    catches: "matmul raises RuntimeError",
    remembers: "it changes .*last",
} | {reads(name): f"by {name}" for name in ("item", "__float__", "__bool__", "numpy", "__int__")}


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize(("act", "reason"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_graph_would_lose_goes_model_by_model_and_says_why(act, reason, backend):
    models = made(lambda: Layer(act), 2)
    x = torch.rand(5, 4, dtype=D)
    with pytest.warns(UserWarning, match=rf"hocket.fuse: Layer: .*{reason}.*\(test_record.py:\d+\); its models run"):
        check(models, x, shared=True, backend=backend, steps=3)
    array = hocket.fuse(models, backend=backend, shared=True, strict=True)
    with pytest.raises(InputError, match=reason):
        called_thrice(array, x)


@pytest.mark.filterwarnings("ignore:hocket.fuse. Layer. mean has got other memory, by set_")
def test_a_buffer_that_gets_other_memory_behind_its_last_reader():
    check(made(lambda: Layer(gets_memory_unread), 2), torch.rand(5, 4, dtype=D), shared=True, backend="rule", steps=3)


class AsksForTheMode(Layer):
    """Branches on the grad mode, where nothing looks at shapes."""

    def forward(self, x):
        return self.a(x) if torch.is_grad_enabled() else self.b(x)


def asks_for_the_mode(m, x):
    return m.a(x) if torch.is_grad_enabled() else m.b(x)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize(
    ("kind", "act"), [(Layer, asks_for_gradients), (Layer, asks_for_the_mode), (AsksForTheMode, asks_for_the_mode)]
)
def test_a_forward_that_asks_for_gradients_is_asked_in_each_call(kind, act):
    models = made(lambda: kind(act), 2)
    array = hocket.fuse(models, backend="rule", shared=True)
    x = torch.rand(5, 4, dtype=D)
    for with_gradients in (True, False, True):
        with torch.set_grad_enabled(with_gradients):
            torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
    with torch.inference_mode():
        torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))


def test_another_graph_for_other_shapes():
    models = made(lambda: Layer(lambda m, x: m.a(x) if x.shape[0] > 3 else m.b(x)), 2)
    array = hocket.fuse(models, backend="rule", shared=True)
    for rows in (2, 5, 2):
        x = torch.randn(rows, 4, dtype=D)
        torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("backend", ["rule", "auto"])
def test_models_whose_graphs_differ_go_one_after_another_and_the_ops_are_named(backend):
    functions = iter([torch.sin, torch.cos])
    models = made(lambda: Layer(functools.partial(lambda act, m, x: act(m.a(x)), next(functions))), 2)
    reason = "the model itself: sin in model 0, the model itself: cos in model 1"
    with pytest.warns(UserWarning, match=reason):
        check(models, torch.ones(5, 4, dtype=D), shared=True, backend=backend, steps=4)
    array = hocket.fuse(models, backend=backend, shared=True, strict=True)
    with pytest.raises(InputError, match=reason):
        called_thrice(array, torch.ones(5, 4, dtype=D))


def test_a_model_that_computes_its_own_loss():
    models = made(lambda: Layer(lambda m, x: cross_entropy(m.a(x), x.argmax(1))), 3)
    check(models, torch.randn(5, 4, dtype=D), shared=True, backend="rule")


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
        array.losses(functional.mse_loss, x, torch.zeros(5, 3).double()).backward()
        assert all(p.grad.isfinite().all() for p in array.parameters())
        assert set(x.unique().tolist()) <= {0.0, 1.0, 2.0}, "dropped once at most"


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize(("backend", "shared"), covering(BACKENDS, [True, False]))
def test_a_model_that_writes_over_its_input_does_so_once(backend, shared, num_models):
    models = made(WritesOver, num_models)
    array = hocket.fuse(models, backend=backend, shared=shared)
    for _ in range(3):
        x = torch.randn((5, 4) if shared else (num_models, 5, 4), dtype=D)
        given = x.clone()
        out = array(given)
        assert torch.equal(given, functional.leaky_relu(x, 0.5))
        for index, model in enumerate(models):
            assert_close(out[index], model((x if shared else x[index]).clone()), "output")


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("way", ["call", "losses"])
def test_a_model_that_writes_over_its_input_trains(way, num_models):
    models = made(WritesOver, num_models)
    array = hocket.fuse(models, shared=True)
    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 3, dtype=D)
    for _ in range(3):
        given = x.clone()
        array.zero_grad()
        if way == "call":
            array.loss(functional.mse_loss, array(given), y).backward()
        else:
            array.losses(functional.mse_loss, given, y).backward()
        assert torch.equal(given, functional.leaky_relu(x, 0.5))
    for index, model in enumerate(models):
        functional.mse_loss(model(x.clone()), y).backward()
        torch.testing.assert_close(array.get_parameter("fused.fc.weight").grad[index], model.fc.weight.grad)
