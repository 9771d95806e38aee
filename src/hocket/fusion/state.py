"""Saving and loading: the states of B plain modules, as of a list of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.fusion.store import Store

__all__ = ["load", "save", "state_of"]


def state_of(store: Store, index: int) -> dict[str, Tensor]:
    """The tensors (views of the stacked ones) that one plain module's state holds, by name."""
    tensors = store.tensors_of(index)
    return {name: tensors[name] for name in store.templates[index].state_dict(keep_vars=True) if name in tensors}


def save(store: Store, found: dict[str, Any], prefix: str, keep_vars: bool, model: int | None) -> None:
    """Write the models' states, or one model's with its own names, into a dict."""
    if model is not None:
        store.check_slot(model)
    for index in range(store.num_models) if model is None else [model]:
        own = f"{prefix}{index}." if model is None else prefix
        for name, tensor in state_of(store, index).items():
            # A view would be saved with the tensors of all models.
            plain = tensor.detach().clone() if model is not None else tensor.detach()
            found[own + name] = tensor if keep_vars else plain


def load(
    store: Store, state_dict: Mapping[str, Any], prefix: str = "", model: int | None = None
) -> tuple[list[str], list[str], list[str]]:
    """Write what `save` gave into the models, or a plain module's state into one of them.

    Returns:
        Keys that are missing, keys that nothing takes, and what does not fit.
    """
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
                elif state_dict[key].shape != tensor.shape:
                    given = tuple(state_dict[key].shape)
                    errors.append(f"{key}: expected shape {tuple(tensor.shape)}, got {given}")
                else:
                    tensor.copy_(state_dict[key])
    return missing, [key for key in state_dict if key.startswith(prefix) and key not in expected], errors
