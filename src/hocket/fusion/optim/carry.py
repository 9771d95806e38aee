"""Carrying optimizer state between B plain optimizers and one fused one.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

A plain state dict numbers its parameters as torch does: in the order of the groups, those of one model only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.hyper import per_model, plain
from hocket.fusion.optim.model_state import ModelState
from hocket.fusion.optim.step_counts import are_per_model, count_dtype, per_count, rejoin

__all__ = [
    "check_fits",
    "check_groups",
    "copied",
    "load_unfused",
    "number_of",
    "params_of",
    "plain_entries",
    "put",
    "unfused",
]


def check_fits(state_dict: Mapping[str, Any], optimizer: ModelState) -> None:
    """Check a fused state dict against the optimizer that is to load it, before anything is changed."""
    total = optimizer.num_models
    saved = state_dict.get("hocket", {}).get("num_models", total)
    if saved != total:
        raise InputError(f"state_dict: expected one of {total} models, got one of {saved}")
    groups = state_dict["param_groups"]
    check_groups("state_dict", groups, [group["params"] for group in optimizer.param_groups])
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in optimizer.bounds:
            value = group.get(key)
            for part in value if type(value) is tuple else (value,):
                if isinstance(part, torch.Tensor) and part.dim() == 1 and len(part) != total:
                    raise InputError(f"state_dict: {key} of group {number}: expected {total} numbers, got {len(part)}")
        for index, p in zip(group["params"], own["params"], strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape != p.shape:
                    raise InputError(
                        f"state_dict: {key} of parameter {index}: expected shape {tuple(p.shape)}, "
                        f"got {tuple(value.shape)}"
                    )


def check_groups(what: str, groups: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Any]]) -> None:
    """Check that a state dict has as many groups, each of as many parameters."""
    found = [len(group["params"]) for group in groups]
    expected = [len(group) for group in params]
    if found != expected:
        raise InputError(f"{what}: expected groups of {expected} parameters, got groups of {found}")


def params_of(optimizer: ModelState, model: int) -> list[list[torch.Tensor]]:
    """For each group the parameters that model has a part in."""
    slots = optimizer._slots
    return [[p for p in group["params"] if slots[p] in (None, model)] for group in optimizer.param_groups]


def _one(value: Any, model: int) -> Any:
    """The part of a group's value that belongs to one model."""
    if type(value) is tuple:
        return tuple(_one(part, model) for part in value)
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return plain(value)[model].item()
    return value


def unfused(optimizer: ModelState, model: int) -> dict[str, Any]:
    """The plain state dict of one model; shares no memory with the fused one."""
    template = optimizer.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group, params in zip(optimizer.param_groups, params_of(optimizer, model), strict=True):
        own = {key: _one(value, model) for key, value in group.items() if key not in ("params", "param_names")}
        numbers = list(range(count, count + len(params)))
        count += len(params)
        packed = {**template, **own, "params": numbers}
        if "param_names" in group:
            names = zip(group["params"], group["param_names"], strict=True)
            mine = set(params)
            packed["param_names"] = [name for p, name in names if p in mine]
        groups.append(packed)
        for number, p in zip(numbers, params, strict=True):
            entries = optimizer.state.get(p)
            if entries:
                fused = optimizer._slots[p] is None
                sliced = {
                    key: _count_of(value, model) if key == "step" else (value[model] if fused else value).clone()
                    for key, value in entries.items()
                    if isinstance(value, torch.Tensor)
                }
                if found := optimizer.plain_state(sliced, own):
                    state[number] = found
    return {"state": state, "param_groups": groups}


def _count_of(step: torch.Tensor, model: int) -> torch.Tensor:
    return (step[model] if step.dim() else step).to(count_dtype(), copy=True)


def load_unfused(optimizer: ModelState, states: Sequence[Mapping[str, Any]]) -> None:
    """See `FusedOptimizer.load_unfused`."""
    total = optimizer.num_models
    if len(states) != total:
        raise InputError(f"states: expected {total}, one for each model, got {len(states)}")
    entries_of: list[dict[torch.Tensor, dict[str, Any]]] = []
    for model, state in enumerate(states):
        params = params_of(optimizer, model)
        check_groups(f"state of model {model}", state["param_groups"], params)
        entries_of.append(dict(plain_entries(f"state of model {model}", optimizer, state, params)))
    numbers = [
        dict(_fused_options(optimizer, [state["param_groups"][number] for state in states]))
        for number in range(len(optimizer.param_groups))
    ]
    # All of it fits: from here on nothing is refused.
    optimizer.state.clear()
    for group, options in zip(optimizer.param_groups, numbers, strict=True):
        for key, value in options.items():
            if key in optimizer.bounds:
                optimizer.set_number(group, key, value)
            else:
                group[key] = value
        for p in group["params"]:
            slot = optimizer._slots[p]
            if slot is not None:
                if p in entries_of[slot]:
                    optimizer.state[p] = {key: copied(value, p, key) for key, value in entries_of[slot][p].items()}
            elif any(entries.get(p) for entries in entries_of):
                optimizer.state[p] = _stacked(optimizer, p, group, [entries.get(p, {}) for entries in entries_of])
    rejoin(optimizer.param_groups, optimizer.state)
    if optimizer._per_model_steps or are_per_model(optimizer.state):
        optimizer.count_per_model()


def plain_entries(
    what: str, optimizer: ModelState, state: Mapping[str, Any], params: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """For each parameter that has one its plain state, checked against the parameter's shape."""
    for group, own in zip(state["param_groups"], params, strict=True):
        for index, p in zip(group["params"], own, strict=True):
            entries = {key: value for key, value in state["state"].get(index, {}).items() if value is not None}
            shape = p.shape[1:] if optimizer._slots[p] is None else p.shape
            for key, value in entries.items():
                if key != "step" and isinstance(value, torch.Tensor) and value.shape != shape:
                    raise InputError(
                        f"{what}: {key} of parameter {index}: expected shape {tuple(shape)}, got {tuple(value.shape)}"
                    )
            if entries:
                yield p, entries


def _fused_options(optimizer: ModelState, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The options of B plain groups as those of a fused one; what only plain optimizers have is left out."""
    for key in groups[0]:
        if key in ("params", "param_names") or any(key not in group for group in groups):
            continue
        values = [number_of(group[key]) for group in groups]
        same = all(value == values[0] for value in values)
        if key in optimizer.bounds:
            if key == "betas":
                checked = tuple(
                    [pair[place] for pair in values] if not same else values[0][place] for place in range(2)
                )
                optimizer._settled(key, checked, torch.device("cpu"))
                yield key, checked
            else:
                optimizer._settled(key, values[0] if same else values, torch.device("cpu"))
                yield key, values[0] if same else values
        elif key in optimizer.defaults:
            if not same:
                raise InputError(f"{key}: expected the same for all models of a group, got {values!r}")
            yield key, values[0]
        elif all(isinstance(value, float) for value in values):  # what schedulers keep there
            yield key, values[0] if same else per_model(values)


def number_of(value: Any) -> Any:
    """A tensor of one element as a Python number; anything else as it stands."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def copied(value: Any, p: torch.Tensor, key: str) -> Any:
    """An entry of a plain state, in the dtype and on the device in which the state of `p` holds it."""
    if key == "step":
        return torch.as_tensor(value, dtype=count_dtype()).detach().to("cpu", copy=True)
    return value.to(p.device, p.dtype, copy=True)


def _stacked(
    optimizer: ModelState, p: torch.Tensor, group: dict[str, Any], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """B plain states of a parameter as one; a model that has none yet begins anew."""
    found: dict[str, Any] = {}
    if optimizer.counts:
        counts = [float(number_of(own.get("step", 0.0))) for own in entries]
        same = all(count == counts[0] for count in counts)
        found["step"] = torch.tensor(counts[0], dtype=count_dtype()) if same else per_count(counts)
    was, optimizer._per_model_steps = optimizer._per_model_steps, True  # each model begins on its own
    try:
        optimizer.make_state(p, group, found)
    finally:
        optimizer._per_model_steps = was
    for model, own in enumerate(entries):
        put(found, model, own)
    optimizer.tidy_state(found)
    return found


def put(state: dict[str, Any], model: int, own: Mapping[str, Any]) -> None:
    """Copy a model's plain state into its slices of a fused state that has all entries."""
    for key, value in own.items():
        if key != "step" and key in state and value is not None:
            state[key][model] = value.to(state[key].device)
    if "fresh" in state and "momentum_buffer" in own:
        state["fresh"][model] = False
