"""What one rank of a partitioned step has of a checkpoint, in the form that `torch.distributed.checkpoint` exchanges.

The form is that of ``torch.distributed.checkpoint.state_dict.get_state_dict``: parameters and buffers by the names of
``model.state_dict()``, optimizer state by the name of its parameter. A rank gives what its part uses, without copies;
of what several ranks have, all have the same between two steps, and one of them writes it. So the parts of all ranks
make up the whole, whatever the number of ranks, and a plain model and optimizer read it back. Of several models the
names are those of ``nn.ModuleDict({"model0": ..., "model1": ...})``, and several optimizers are what `get_state_dict`
makes of a list of them: states by parameter, groups one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hocket.errors import InputError
from hocket.tracing.state import Entry, Inventory, inventory

__all__ = ["load_part_state", "part_state"]


def part_state(
    model: Any, optimizer: Any, entries: Mapping[str, Entry], kept: Collection[str]
) -> dict[str, dict[str, Any]]:
    """What a rank has of model and optimizer: live tensors, and options of the optimizer.

    Args:
        model: the module, or a list.
        optimizer: as well.
        entries: the places of all that outlives a step, by name.
        kept: the names of those that have their memory here.

    Raises:
        InputError: two optimizers keep state of one parameter; names it.
    """
    places = inventory(model, optimizer)
    here = {id(entries[name].get()) for name in kept}

    def has(value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or id(value) in here

    names = {id(entry.get()): entry.name for entry in entries.values() if entry.kind == "parameter"}
    state: dict[str, dict[str, Any]] = {}
    for each in places.optimizers:
        for parameter, values in each.state.items():
            name = names[id(parameter)]
            if name in state:
                raise InputError(f"distribute: two optimizers keep state of {name!r}; a checkpoint has room for one")
            state[name] = {key: value for key, value in values.items() if has(value)}
    groups = [
        {key: [names[id(each)] for each in value] if key == "params" else value for key, value in group.items()}
        for group in _groups(places)
    ]
    whole: dict[str, Any] = {}
    for number, each_model in enumerate(places.models):
        prefix = f"model{number}." if len(places.models) > 1 else ""
        whole |= each_model.state_dict(keep_vars=True, prefix=prefix)
    return {
        "model": {
            key: value.detach() if isinstance(value, torch.Tensor) else value
            for key, value in whole.items()
            if has(value)
        },
        "optimizer": {"state": {name: values for name, values in state.items() if values}, "param_groups": groups},
    }


def load_part_state(
    model: Any, optimizer: Any, entries: Mapping[str, Entry], kept: Collection[str], state: Mapping[str, Any]
) -> None:
    """Take what `part_state` gives: into the memory that is there, and the options into their groups.

    Raises:
        InputError: a tensor or a group is missing, or is not like the one that is here; names it, and nothing has
            changed.
    """
    mine = part_state(model, optimizer, entries, kept)
    pairs = [*_pairs("model", mine["model"], state.get("model"))]
    given = state.get("optimizer") or {}
    for name, values in mine["optimizer"]["state"].items():
        pairs += _pairs(f"optimizer state of {name}", values, given.get("state", {}).get(name))
    groups, new_groups = _groups(inventory(model, optimizer)), given.get("param_groups", ())
    if len(groups) != len(new_groups):
        raise InputError(f"distribute: expected {len(groups)} groups of the optimizer, got {len(new_groups)}")
    with torch.no_grad():
        for own, new in pairs:
            own.copy_(new)  # of what was loaded in place it is the same memory
    for group, new in zip(groups, new_groups, strict=True):
        group.update({key: value for key, value in new.items() if key != "params"})


def _pairs(what: str, own: Mapping[str, Any], new: Mapping[str, Any] | None) -> list[tuple[Any, Any]]:
    found = []
    for key, value in own.items():
        if not isinstance(value, torch.Tensor):
            continue
        other = (new or {}).get(key)
        if not isinstance(other, torch.Tensor):
            raise InputError(f"distribute: {what}: {key!r} is missing in what is loaded")
        if (other.shape, other.dtype) != (value.shape, value.dtype):
            raise InputError(
                f"distribute: {what}: {key!r} is {value.dtype} {tuple(value.shape)} here, and {other.dtype} "
                f"{tuple(other.shape)} in what is loaded"
            )
        found.append((value, other))
    return found


def _groups(places: Inventory) -> list[dict[str, Any]]:
    return [group for each in places.optimizers for group in each.param_groups]
