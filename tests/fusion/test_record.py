"""Graphs of forwards that run: what they hold, and what none can stand for."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.fusion.forwards import (
    FOLLOWED,
    OTHERS,
    REFUSED,
    AsksForTheMode,
    Layer,
    asks_for_gradients,
    asks_for_the_mode,
    by_its_own_flag,
    called_thrice,
    gets_memory_unread,
    without_gradient,
    written,
)
from tests.fusion.oracle import assert_each, check, check_step, made
from torch.nn.functional import cross_entropy

import hocket
from quick import covering
from support.refusals import refused

D = torch.float64
BACKENDS = ["rule", "vmap", "loop", "auto"]


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_among_the_outputs_are_each_models_own(backend):
    numbers = iter([0.5, 1.0, 2.0])
    models = made(lambda: Layer(lambda m, x: (m.a(x), m.number), next(numbers)), 3)
    array, x = hocket.fuse(models, backend=backend, shared=True), torch.randn(5, 4, dtype=D)
    for _ in range(3):
        assert array(x)[1].tolist() == [0.5, 1.0, 2.0]
        losses = array.loss(lambda out, y: (out[0] / out[1] - y).square().mean(), array(x), x)
        assert_each(losses, [(model.a(x) / model.number - x).square().mean() for model in models])


def test_blocks_stay_separate_behind_shapes():  # with all others around them fused
    models = made(lambda: Layer(written), 3)
    array = hocket.fuse(models, backend="rule", shared=True, separate=["a"])
    x = torch.randn(5, 4, dtype=D)
    assert_each(array(x), [model(x) for model in array.unfuse()])


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("act", [lambda m, x: m.a(x) + m.a.weight.sum(), lambda m, x: m.a(x) + m.a.weight[x.shape[0]]])
def test_a_parameter_of_a_separate_block_that_is_read_elsewhere(act):
    models = made(lambda: Layer(act), 2)
    array = hocket.fuse(models, backend="rule", shared=True, separate=["a"])
    x = torch.randn(3, 4, dtype=D)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize(("act", "reason"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_graph_would_lose_goes_model_by_model_and_says_why(act, reason, backend):
    models = made(lambda: Layer(act), 2)
    x = torch.rand(5, 4, dtype=D)
    with pytest.warns(UserWarning, match=rf"hocket.fuse: Layer: .*{reason}.*\(forwards.py:\d+\); its models run"):
        check(models, x, shared=True, backend=backend, steps=3)
    array = hocket.fuse(models, backend=backend, shared=True, strict=True)
    refused(reason, called_thrice, array, x)


@pytest.mark.filterwarnings("ignore:hocket.fuse. Layer. mean has got other memory, by set_")
def test_a_buffer_that_gets_other_memory_behind_its_last_reader():
    check(made(lambda: Layer(gets_memory_unread), 2), torch.rand(5, 4, dtype=D), shared=True, backend="rule", steps=3)


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


def test_another_graph_for_another_layout():
    models = made(lambda: Layer(lambda m, x: m.a(x) if x.is_contiguous() else m.b(x)), 2)
    array, x = hocket.fuse(models, backend="rule", shared=True), torch.randn(4, 4, dtype=D)
    for each in (x, x, x.t(), x, x.t()):
        torch.testing.assert_close(array(each), torch.stack([model(each) for model in models]))


@pytest.mark.parametrize("backend", ["rule", "auto"])
def test_models_whose_graphs_differ_go_one_after_another_and_the_ops_are_named(backend):
    functions = iter([torch.sin, torch.cos])
    models = made(lambda: Layer(functools.partial(lambda act, m, x: act(m.a(x)), next(functions))), 2)
    reason = "the model itself: sin in model 0, the model itself: cos in model 1"
    with pytest.warns(UserWarning, match=reason):
        check(models, torch.ones(5, 4, dtype=D), shared=True, backend=backend, steps=4)
    array = hocket.fuse(models, backend=backend, shared=True, strict=True)
    refused(reason, called_thrice, array, torch.ones(5, 4, dtype=D))


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
        check_step(array, models, lambda model: model(x))
    assert array._store.tensor("b.weight").tensor.grad is None


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
