"""Models change in mid-training: one leaves, or another one takes its place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare, differing_attribute
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


def refill(store: Store, model: int, new: nn.Module, seed: int | None, training: bool) -> tuple[nn.Module, bool]:
    """Put another model into a slot, in place.

    Args:
        store: of the models.
        model: the slot.
        new: a module that could have been fused with the others.
        seed: of its random numbers; needed where the store has seeds.
        training: whether the models are in training.

    Returns:
        The old model, and whether only values have changed: then what was made from the models as they were holds.

    Raises:
        InputError: the new model does not fit; then nothing has changed.
    """
    store.check_slot(model)
    if store.seeds is not None and seed is None:
        raise InputError("refill: seed: expected a number, because the other models have seeds")
    old = store.plain(model)
    other = next((index for index in range(store.num_models) if index != model), None)
    blocks = compare([old if other is None else store.plain(other), new], [*store.separate_index])
    extra = set(blocks.separate) - set(store.blocks.separate)
    if extra:
        named = "; ".join(f"{name}: {blocks.separate[name]}" for name in sorted(extra))
        raise InputError(f"refill: the new model differs from the others: {named}")
    tensors = dict(named_tensors(new))
    with torch.no_grad():
        for name in store.places:
            whole = store.tensor(name).tensor
            whole[model].copy_(tensors[name])
            if whole.grad is not None:
                whole.grad[model].zero_()
        for block, place in store.separate_index.items():
            group, module = store.group(place), new.get_submodule(block)
            mine, its = dict(named_tensors(group[model])), dict(named_tensors(module))
            shapes = {name: tensor.shape for name, tensor in mine.items()}
            if _same_attributes(group[model], module) and shapes == {name: t.shape for name, t in its.items()}:
                for name, tensor in mine.items():  # the parameters that an optimizer knows
                    tensor.copy_(its[name])
                continue
            group[model] = copy.deepcopy(module)
            store.separate[place] = nn.ModuleList(group)
            mark(group)
    only_values = not store.separate_index and _same_attributes(store.templates[model], new)
    if not only_values:
        store.templates[model] = template_of(new, model)
        store.templates[model].train(training)
    if store.seeds is not None and seed is not None:
        store.seeds[model] = int(seed)
        for generators in store.generators.values():
            generators[model].manual_seed(int(seed))
    return old, only_values


def _same_attributes(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models of one structure differ in nothing but tensors: what cannot be compared counts as other."""
    layers = [list(model.named_modules()) for model in (first, second)]
    kinds = [[(name, type(layer)) for name, layer in each] for each in layers]
    pairs = zip(layers[0], layers[1], strict=False)
    return kinds[0] == kinds[1] and all(differing_attribute(one, other) is None for (_, one), (_, other) in pairs)


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data
