"""One rank's part of a checkpoint, in the form that `torch.distributed.checkpoint` exchanges.

The form is that of ``torch.distributed.checkpoint.state_dict.get_state_dict``: parameters and buffers by the names of
``model.state_dict()``, optimizer state by the name of its parameter. A rank gives the tensors of its part, without
copies. Tensors of several ranks are equal between two steps, and one rank writes them. So the parts of all ranks make
up the whole for any number of ranks, and an ordinary model and optimizer can read it. Several models have the names of
``nn.ModuleDict({"model0": ..., "model1": ...})``, and several optimizers the form that `get_state_dict` gives a list of
them: states by parameter, groups one after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.distributed.description import digest
from hocket.errors import InputError
from hocket.tracing.sources import Entry
from hocket.tracing.state import Inventory, inventory

LOADED = "loaded"


def part_state(
    model: Any, optimizer: Any, entries: Mapping[str, Entry], kept: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The tensors and options of the state of a rank. Two optimizers of one parameter are an `InputError`."""
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


@dataclass(frozen=True)
class PartToLoad:
    """The values that a rank loads from a checkpoint."""

    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # pairs of a tensor here, and its new value
    # pairs of a group of an optimizer here, and one with its new options
    groups: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...]

    def take(self) -> None:
        """Load the values into the existing tensors and groups."""
        with torch.no_grad():
            for own, new in self.tensors:
                own.copy_(new)  # the same memory if torch has loaded it in place
        for group, options in self.groups:
            group.update({key: value for key, value in options.items() if key != "params"})


def part_to_load(
    model: Any, optimizer: Any, entries: Mapping[str, Entry], kept: Collection[str], state: Mapping[str, Any]
) -> PartToLoad:
    """Choose what to load of a state like `part_state`'s, or raise an `InputError` that names what does not fit."""
    if not isinstance(state, Mapping):
        raise InputError(f"distribute: expected a mapping, as state_dict() gives it, got {type(state).__name__}")
    mine = part_state(model, optimizer, entries, kept)
    pairs = [*_pairs("model", mine["model"], state.get("model"))]
    given = state.get("optimizer") or {}
    for name, values in mine["optimizer"]["state"].items():
        pairs += _pairs(f"optimizer state of {name}", values, given.get("state", {}).get(name))
    groups, new_groups = _groups(inventory(model, optimizer)), given.get("param_groups", ())
    if len(groups) != len(new_groups):
        raise InputError(f"distribute: expected {len(groups)} groups of the optimizer, got {len(new_groups)}")
    return PartToLoad(tuple(pairs), tuple(zip(groups, new_groups, strict=True)))


def digests_of(entries: Mapping[str, Entry], state: Mapping[str, Any], fails: bool) -> list[int]:
    """Hashes below 2^63 of a state to load, by which ranks compare their states.

    The first number is 1 if the rank cannot load it. The second is a hash of the options, and a hash for each place
    follows, or 0 if the state lacks it.
    """
    if fails:
        return [1] + [0] * (len(entries) + 1)
    of_model, of_optimizer = state.get("model") or {}, state.get("optimizer") or {}
    options = [
        sorted((key, repr(value)) for key, value in group.items() if key != "params")
        for group in of_optimizer.get("param_groups", ())
    ]
    found = [0, _number(hashlib.sha256(repr(options).encode()).hexdigest())]
    for entry in entries.values():
        given = of_model.get(entry.name)
        if entry.kind == "state":
            given = of_optimizer.get("state", {}).get(entry.owner, {}).get(entry.key)
        found.append(_number(digest(given)) if isinstance(given, torch.Tensor) else 0)
    return found


def check_alike(hashes: Mapping[int, Sequence[int]], names: Sequence[str]) -> None:
    """Refuse to load, on all ranks, if one cannot or two have different values of a place, by `digests_of` each."""
    for rank, values in hashes.items():
        if values[0]:
            raise InputError(
                f"distribute: rank {rank} cannot load what it was given, so no rank does; its error says why"
            )
    for at, name in enumerate(("options of the optimizer", *names), 1):
        first: tuple[int, int] | None = None
        for rank, values in hashes.items():
            if not values[at]:
                continue
            if first is not None and values[at] != first[1]:
                raise InputError(
                    f"distribute: rank {first[0]} and rank {rank} load different checkpoints: {name!r} differs"
                )
            first = first or (rank, values[at])


def _number(digest_in_hex: str) -> int:
    return int(digest_in_hex[:15], 16) or 1


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
