"""Models change in mid-training: one leaves or is replaced, or their states are saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare, differ_in_values, tied
from hocket.fusion.shared_objects import check_memory, named_tensors
from hocket.fusion.store import Store, mark


def select_models(store: Store, models: Sequence[int]) -> None:
    """Keep these models, in this order. Parameters keep their identity and lose their gradients."""
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
    """Put another model that fits into a slot, in place, with a seed if the store has seeds.

    Returns True if only values have changed, so that programs made before still hold.
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
        pairs = [(place, new.get_submodule(block)) for block, place in store.separate_index.items()]
        memo: dict[int, Any] = {}  # a tensor of several blocks stays one
        others = []
        for place, module in pairs:
            old = store.group(place)[model]
            if tied(store.templates[model]) != tied(new) or not differ_in_values(old, module):
                others.append((place, module))
                continue
            its = dict(named_tensors(module))
            for name, tensor in named_tensors(old):  # the parameters that an optimizer knows
                tensor.copy_(its[name])
                memo[id(its[name])] = tensor
        for place, module in others:
            group = store.group(place)
            group[model] = copy.deepcopy(module, memo)
            store.separate[place] = nn.ModuleList(group)
            mark(group)
    store.originals.add(new, model)
    if not only_values:
        store.templates[model] = store.template_of(new, model)
        store.templates[model].train(training)
    if store.seeds is not None and seed is not None:
        store.seeds[model] = int(seed)
        for generators in store.generators.values():
            generators[model].manual_seed(int(seed))
    return only_values


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape. A short change of type makes torch renew its gradient's node."""
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data


def _is_extra(name: str) -> bool:
    """True of the name of what a layer gives by `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state"


def state_of(store: Store, index: int) -> dict[str, Any]:
    """One plain module's state: tensors (views of the stacked ones), and what layers give by `get_extra_state`."""
    tensors, state = store.tensors_of(index), store.templates[index].state_dict(keep_vars=True)
    return {name: tensors.get(name, state[name]) for name in state if name in tensors or _is_extra(name)}


def save(store: Store, found: dict[str, Any], prefix: str, keep_vars: bool, model: int | None) -> None:
    """Write the models' states, or one model's with its own names, into a dict."""
    if model is not None:
        store.check_slot(model)
    for index in range(store.num_models) if model is None else [model]:
        own = f"{prefix}{index}." if model is None else prefix
        for name, tensor in state_of(store, index).items():
            if keep_vars or _is_extra(name):
                found[own + name] = tensor
            else:  # a view would be saved with the tensors of all models
                found[own + name] = tensor.detach().clone() if model is not None else tensor.detach()


def load(
    store: Store, state_dict: Mapping[str, Any], prefix: str = "", model: int | None = None
) -> tuple[list[str], list[str], list[str]]:
    """Load a state that `save` gave, or a plain state into one model. Returns missing, unexpected keys, errors."""
    missing: list[str] = []
    errors: list[str] = []
    expected = set()
    with torch.no_grad():
        for index in range(store.num_models) if model is None else [model]:
            for name, tensor in state_of(store, index).items():
                key = f"{prefix}{index}.{name}" if model is None else prefix + name
                expected.add(key)
                if key not in state_dict:
                    missing.append(key)
                elif _is_extra(name):
                    layer = store.templates[index].get_submodule(name.rpartition(".")[0])
                    layer.set_extra_state(state_dict[key])
                elif state_dict[key].shape != tensor.shape:
                    given = tuple(state_dict[key].shape)
                    errors.append(f"{key}: expected shape {tuple(tensor.shape)}, got {given}")
                else:
                    tensor.copy_(state_dict[key])
    return missing, [key for key in state_dict if key.startswith(prefix) and key not in expected], errors
