"""Models change in mid-training: one leaves, or another one takes its place."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare
from hocket.fusion.python_state import held
from hocket.fusion.store import Store, mark, named_tensors, template_of

__all__ = ["refill", "select_models"]


def select_models(store: Store, models: Sequence[int]) -> None:
    """Keep these models, in this order, in place.

    Parameters keep their identity; their first axis is as long as `models`, and their gradients are gone.

    Raises:
        InputError: no models, one twice, or one that is not there.
    """
    keep = list(models)
    for model in keep:
        store.check_slot(model)
    if not keep or len(set(keep)) < len(keep):
        raise InputError(f"models: expected at least one model, each at most once, got {keep}")
    for container, leaf in dict.fromkeys(store.places.values()):
        tensor: Any = getattr(container, leaf)
        kept = tensor.detach()[keep].clone()
        if isinstance(tensor, nn.Parameter):
            tensor.grad = None
            _replace(tensor, kept)
        else:
            container._buffers[leaf] = kept
    for number in range(len(store.separate)):
        group = store.group(number)
        store.separate[number] = nn.ModuleList([group[index] for index in keep])
    store.templates = [store.templates[index] for index in keep]
    if store.seeds is not None:
        store.seeds = [store.seeds[index] for index in keep]
    store.generators = {device: tuple(each[index] for index in keep) for device, each in store.generators.items()}
    store.num_models = len(keep)
    store.mark()


def refill(store: Store, model: int, new: nn.Module, seed: int | None, training: bool) -> bool:
    """Put another model into a slot, in place.

    A model that differs from the one in the slot in nothing but the values of its tensors is not compared any further:
    that one could be fused with the others.

    Args:
        store: of the models.
        model: the slot.
        new: a module that could have been fused with the others.
        seed: of its random numbers; needed where the store has seeds.
        training: whether the models are in training.

    Returns:
        Whether only values have changed: then what was made from the models as they were holds.

    Raises:
        InputError: the new model does not fit; then nothing has changed.
    """
    store.check_slot(model)
    if store.seeds is not None and seed is None:
        raise InputError("refill: seed: expected a number, because the other models have seeds")
    only_values = not store.separate_index and _differ_in_values(store.templates[model], new)
    if not only_values:
        other = next((index for index in range(store.num_models) if index != model), model)
        blocks = compare([store.plain(other), new], [*store.separate_index])
        extra = set(blocks.separate) - set(store.blocks.separate)
        if extra:
            named = "; ".join(f"{name}: {blocks.separate[name]}" for name in sorted(extra))
            raise InputError(f"refill: the new model differs from the others: {named}")
    tensors, stacked = dict(named_tensors(new)), store.all_tensors()
    with torch.no_grad():
        if stacked:
            torch._foreach_copy_([whole[model] for whole in stacked.values()], [tensors[name] for name in stacked])
        if grads := [whole.grad[model] for whole in stacked.values() if whole.grad is not None]:
            torch._foreach_zero_(grads)
        for block, place in store.separate_index.items():
            group, module = store.group(place), new.get_submodule(block)
            if _differ_in_values(group[model], module):
                its = dict(named_tensors(module))
                for name, tensor in named_tensors(group[model]):  # the parameters that an optimizer knows
                    tensor.copy_(its[name])
                continue
            group[model] = copy.deepcopy(module)
            store.separate[place] = nn.ModuleList(group)
            mark(group)
    if not only_values:
        store.templates[model] = template_of(new, model)
        store.templates[model].train(training)
    if store.seeds is not None and seed is not None:
        store.seeds[model] = int(seed)
        for generators in store.generators.values():
            generators[model].manual_seed(int(seed))
    return only_values


PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
TENSORS = frozenset(("_parameters", "_buffers", "_modules"))
DICTS = frozenset((dict, OrderedDict))


def _differ_in_values(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models differ in nothing but values of tensors; what cannot be compared counts as other.

    Args:
        first: a model; its tensors may be on the meta device.
        second: another one.
    """
    twins: dict[int, Tensor] = {}
    ahead = [(first, second)]
    while ahead:
        one, other = ahead.pop()
        mine, its = vars(one), vars(other)
        if type(one) is not type(other) or mine.keys() != its.keys():
            return False
        for key, value in mine.items():
            # Spelt out for what a module has most of: dicts without hooks.
            if key not in TENSORS and (value or its[key] if type(value) in DICTS else not _is_same(value, its[key])):
                return False
        for tensors, others in ((one._parameters, other._parameters), (one._buffers, other._buffers)):
            if list(tensors) != list(others):
                return False
            for name, tensor in tensors.items():
                twin: Any = others[name]
                if tensor is None or twin is None:
                    if tensor is not twin:
                        return False
                elif twins.setdefault(id(tensor), twin) is not twin or not _is_alike(tensor, twin):
                    return False
        if list(one._modules) != list(other._modules):
            return False
        for name, module in one._modules.items():
            inner = other._modules[name]
            if module is not None and inner is not None:
                ahead.append((module, inner))
            elif module is not inner:
                return False
    return len({id(twin) for twin in twins.values()}) == len(twins)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two attributes are the same plain value, or both have nothing in them."""
    if type(one) is not type(other):
        return False
    if type(one) in PLAIN:
        return bool(one == other)
    if one is other:  # a function, which copies share; what it holds may be a part of one of the models
        return not any(isinstance(each, (nn.Module, Tensor)) for each in held(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in (list, set) and not one and not other


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (
        type(one) is type(other)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.requires_grad == other.requires_grad
    )


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data
