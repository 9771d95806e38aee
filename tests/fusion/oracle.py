"""The oracle: B fused models against B independent torch modules, in float64, tensor by tensor.

An error is the largest difference of two tensors over the largest magnitude of the plain one (a relative error in the
maximum norm): what rounding does to an element of a sum goes by the terms of the sum, not by how nearly they cancel in
that element, so an error relative to each element alone would say more about cancellation than about the rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Set
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket

TOLERANCE = 1e-12
# A fault with 2 or 7 models and not with 3 would be a surprise: the quick tests leave them out.
SIZES = (1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow))


def made(make: Callable[[], nn.Module], num_models: int, *, training: bool = True) -> list[nn.Module]:
    """Models with other weights each, and, where there are any, other running statistics."""
    torch.manual_seed(num_models)
    models = []
    for _ in range(num_models):
        model = make().double().train(training)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5 if "var" in name else torch.randn_like(buffer))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        models.append(model)
    return models


def assert_close(fused: Tensor, plain: Tensor, what: str) -> None:
    """To 1e-12 relative to the largest element of the plain one."""
    assert fused.shape == plain.shape, f"{what}: {tuple(fused.shape)} fused, {tuple(plain.shape)} plain"
    assert fused.dtype == plain.dtype, f"{what}: {fused.dtype} fused, {plain.dtype} plain"
    if not plain.is_floating_point():
        assert torch.equal(fused, plain), what
        return
    assert torch.equal(fused.isnan(), plain.isnan()), f"{what}: NaN in other places"
    scale = plain.abs().nan_to_num().max().item() if plain.numel() else 0.0
    error = (fused - plain).abs().nan_to_num().max().item() if plain.numel() else 0.0
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.3e}, of {scale:.3e}"


def assert_each(fused: Tensor, alone: Iterable[Tensor], what: str = "output") -> None:
    """Each model's part of a fused tensor is what the model gives alone."""
    for index, (part, plain) in enumerate(zip(fused.detach().as_subclass(Tensor), alone, strict=True)):
        assert_close(part, plain.detach(), f"{what} of model {index}")


def assert_same_parameters(array: Any, models: list[nn.Module]) -> None:
    """The models of an array are where plain ones are."""
    for index, (fused, plain) in enumerate(zip(array.unfuse(), models, strict=True)):
        for (name, parameter), own in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert_close(parameter.detach(), own.detach(), f"{name} of model {index}")


def weighted(outputs: Any, weights: list[Tensor]) -> Tensor:
    """One number of a tree of outputs, in which every element counts differently."""
    tensors = floats(outputs)
    return sum((out * weight).sum() for out, weight in zip(tensors, weights, strict=True))  # type: ignore[return-value]


def floats(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check(
    models: list[nn.Module],
    *inputs: Any,
    shared: bool,
    backend: str = "rule",
    steps: int = 2,
    expect: set[str] | None = None,
    vanishing: Set[str] = frozenset(),
    **options: Any,
) -> hocket.fuse:
    """Outputs, gradients of parameters and inputs, and buffers, over a few passes.

    Args:
        models: float64 models; they are not changed.
        inputs: of all models where `shared`, else with a models' axis.
        shared: see `inputs`.
        backend: of `hocket.fuse`.
        steps: passes, each of which may move running statistics; with "auto" three at least.
        expect: what may have computed the ops, such as {"rule", "shared"}.
        vanishing: see `check_state`.
        options: of `hocket.fuse`.
    """
    num_models = len(models)
    plain = [copy.deepcopy(model) for model in models]
    array = hocket.fuse(models, backend=backend, shared=shared, **options)
    for _ in range(max(steps, 3) if backend == "auto" else steps):  # the first ones may run the plain models
        array.zero_grad()
        for model in plain:
            model.zero_grad()
        fused_inputs = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
        own_inputs = [
            [
                (each if shared else each[index]).detach().clone().requires_grad_(each.is_floating_point())
                for each in inputs
            ]
            for index in range(num_models)
        ]
        out = array(*fused_inputs)
        own = [model(*given) for model, given in zip(plain, own_inputs, strict=True)]
        flat = pytree.tree_leaves(out)
        for index in range(num_models):
            for number, (fused, expected) in enumerate(zip(flat, pytree.tree_leaves(own[index]), strict=True)):
                assert_close(fused[index], expected, f"output {number} of model {index}")
        for each, given in zip(fused_inputs, inputs, strict=True):
            assert torch.equal(each, given), "an input was written to"
        weights = [torch.randn_like(each) for each in floats(out)]
        if any(each.requires_grad for each in floats(out)):
            weighted(out, weights).backward()
            for index in range(num_models):
                weighted(own[index], [weight[index] for weight in weights]).backward()
        for number, each in enumerate(fused_inputs):
            if each.grad is None:
                assert all(given[number].grad is None for given in own_inputs)
            elif shared:
                assert_close(each.grad, sum(given[number].grad for given in own_inputs), f"gradient of input {number}")
            else:
                for index in range(num_models):
                    what = f"gradient of input {number}, model {index}"
                    assert_close(each.grad[index], own_inputs[index][number].grad, what)
        check_state(array, plain, vanishing)
    if expect is not None:
        used = {step.used for program in array._calls.programs.made() for step in program.steps if step.used}
        assert used <= expect, array.report()
    return array


def check_step(
    array: Any, models: list[nn.Module], run: Callable[[Any], Tensor], vanishing: Set[str] = frozenset()
) -> None:
    """Outputs, gradients and buffers of one step; the models are compared as they are."""
    out = run(array)
    assert out.shape[0] == len(models)
    weight = torch.randn_like(out[0])
    (out * weight).sum().backward()
    for index, model in enumerate(models):
        own = run(model)
        (own * weight).sum().backward()
        assert_close(out[index].detach(), own.detach(), f"output of model {index}")
    check_state(array, models, vanishing)


def biases_before_norm(model: nn.Module) -> set[str]:
    """Biases that a batch norm takes out again right behind them: their gradients are zero, and in torch rounding."""
    found = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        for (name, layer), (_, after) in pairwise(module.named_children()):
            if isinstance(after, nn.modules.batchnorm._BatchNorm) and getattr(layer, "bias", None) is not None:
                found.add(f"{path}.{name}.bias" if path else f"{name}.bias")
    return found


def biases_of_keys(model: nn.Module) -> set[str]:
    """Parameters that move all scores of a query alike, which a softmax removes: gradients are rounding noise."""
    return {name for name, _ in model.named_parameters() if name.endswith(("key.bias", "k_lin.bias"))}


def check_state(array: Any, plain: list[nn.Module], vanishing: Set[str] = frozenset()) -> None:
    """Parameters, their gradients, and buffers; of biases without influence only that their gradients are about zero.

    `vanishing` names more of them than `biases_before_norm` and `biases_of_keys`: a batch norm takes them out again
    further behind.
    """
    vanishing = vanishing | biases_before_norm(plain[0]) | biases_of_keys(plain[0])
    state = array.state_dict(keep_vars=True)
    expected = nn.ModuleList(plain).state_dict(keep_vars=True)
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert_close(state[name].detach(), tensor.detach(), name)
    for index, model in enumerate(plain):
        for name, parameter in model.named_parameters():
            gradient = grad_of(array, name, index)
            if parameter.grad is not None and name in vanishing:
                weight = model.get_parameter(name.removesuffix("bias") + "weight").grad
                assert gradient is not None, name
                for each in (gradient, parameter.grad):
                    assert each.abs().max() <= 1e-9 * weight.abs().max(), name
            elif parameter.grad is None:
                assert gradient is None or not gradient.any(), f"{name} of model {index}: a gradient where none is"
            else:
                assert gradient is not None, f"{name} of model {index}: no gradient"
                assert_close(gradient, parameter.grad, f"gradient of {name}, model {index}")


def grad_of(array: Any, name: str, index: int) -> Tensor | None:
    """The gradient of one model's parameter."""
    if name in array._store.places:
        whole = array._store.tensor(name).tensor.grad
        return None if whole is None else whole[index]
    for block, place in array._store.separate_index.items():
        if name.startswith(block + "."):
            return array.separate[place][index].get_parameter(name.removeprefix(block + ".")).grad
    raise AssertionError(name)
