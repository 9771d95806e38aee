"""Models change in mid-training: one leaves, or another one takes its place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare, differ_in_values
from hocket.fusion.memory import check_memory
from hocket.fusion.store import Store, mark, named_tensors

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

    Returns:
        Whether only values have changed: then what was made from the models as they were holds.

    Raises:
        InputError: the new model does not fit; then nothing has changed.
    """
    store.check_slot(model)
    if store.seeds is not None and seed is None:
        raise InputError("refill: seed: expected a number, because the other models have seeds")
    check_memory([new])
    only_values = not store.separate_index and differ_in_values(store.templates[model], new)
    if not only_values:
        other = next((index for index in range(store.num_models) if index != model), model)
        separate = compare([store.plain(other), new], [*store.separate_index])
        extra = set(separate) - set(store.reasons)
        if extra:
            named = "; ".join(f"{name}: {separate[name]}" for name in sorted(extra))
            raise InputError(f"refill: the new model differs from the others: {named}")
    tensors, stacked = dict(named_tensors(new)), store.all_tensors()
    with torch.no_grad():
        if stacked:
            torch._foreach_copy_([whole[model] for whole in stacked.values()], [tensors[name] for name in stacked])
        if grads := [whole.grad[model] for whole in stacked.values() if whole.grad is not None]:
            torch._foreach_zero_(grads)
        for block, place in store.separate_index.items():
            group, module = store.group(place), new.get_submodule(block)
            if differ_in_values(group[model], module):
                its = dict(named_tensors(module))
                for name, tensor in named_tensors(group[model]):  # the parameters that an optimizer knows
                    tensor.copy_(its[name])
                continue
            group[model] = copy.deepcopy(module)
            store.separate[place] = nn.ModuleList(group)
            mark(group)
    if not only_values:
        store.templates[model] = store.template_of(new, model)
        store.templates[model].train(training)
    if store.seeds is not None and seed is not None:
        store.seeds[model] = int(seed)
        for generators in store.generators.values():
            generators[model].manual_seed(int(seed))
    return only_values


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data
