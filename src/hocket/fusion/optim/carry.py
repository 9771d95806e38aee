"""The state of a fused optimizer, by models: as B plain states and back, of some of the models, of a new one.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

A plain state dict numbers its parameters as torch does: in the order of the groups, those of one model only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.counts import count_dtype, rejoin
from hocket.fusion.optim.hyper import PerModel, is_row, per_model, plain
from hocket.fusion.optim.options import as_tuple
from hocket.fusion.optim.slots import Slots

if TYPE_CHECKING:
    from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["check_fits", "checked_refill", "is_same_structure", "load_unfused", "refill", "select_models"]
__all__ += ["structure", "unfused"]

Entries = dict[str, Any]


# ---------------------------------------- B plain states, and back


def params_of(optimizer: FusedOptimizer, model: int) -> list[list[torch.Tensor]]:
    """For each group the parameters that model has a part in."""
    slots = optimizer._slots
    return [[p for p in group["params"] if slots[p] in (None, model)] for group in optimizer.param_groups]


def unfused(optimizer: FusedOptimizer, model: int) -> dict[str, Any]:
    """The plain state dict of one model; shares no memory with the fused one."""
    template = optimizer.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group, params in zip(optimizer.param_groups, params_of(optimizer, model), strict=True):
        own = {key: _one(value, model) for key, value in group.items() if key not in ("params", "param_names")}
        numbers = list(range(count, count + len(params)))
        count += len(params)
        names = {"param_names": _names_of(group, params)} if "param_names" in group else {}
        groups.append({**template, **own, "params": numbers, **names})
        for number, p in zip(numbers, params, strict=True):
            entries = {
                key: value[model] if _has_rows(optimizer, p, key, value) else value
                for key, value in optimizer.state.get(p, {}).items()
            }
            copies = {
                key: value.to("cpu", count_dtype(), copy=True) if key == "step" else value.clone()
                for key, value in entries.items()
            }
            if copies and (found := optimizer.plain_state(copies, own)):
                state[number] = found
    return {"state": state, "param_groups": groups}


def load_unfused(optimizer: FusedOptimizer, states: Sequence[Mapping[str, Any]]) -> None:
    """See `FusedOptimizer.load_unfused`."""
    total = optimizer.num_models
    if len(states) != total:
        raise InputError(f"states: expected {total}, one for each model, got {len(states)}")
    plains = [_plain_entries(f"state of model {model}", optimizer, state, model) for model, state in enumerate(states)]
    options = [
        dict(_fused_options(optimizer, [state["param_groups"][number] for state in states]))
        for number in range(len(optimizer.param_groups))
    ]
    # All of it fits: from here on nothing is refused.
    optimizer.state.clear()
    was, optimizer._per_model_steps = optimizer._per_model_steps, True
    for group, numbers in zip(optimizer.param_groups, options, strict=True):
        for key, value in numbers.items():
            if key in optimizer.bounds:
                optimizer.set_number(group, key, value)
            else:
                group[key] = value
        for p in group["params"]:
            for model in range(total):
                if plains[model].get(p):
                    _put(optimizer, group, p, model, plains[model][p])
    optimizer._per_model_steps = was
    for entries in optimizer.state.values():
        step = entries.get("step")
        if step is not None and step.dim() and not was and bool((step == step[0]).all()):
            entries["step"] = torch.tensor(step[0].item(), dtype=count_dtype())
    rejoin(optimizer)


def checked_refill(
    optimizer: FusedOptimizer, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[dict[torch.Tensor, Entries], list[dict[str, Any]]]:
    """What a refill sets: for each parameter the new model's plain state, for each group its numbers."""
    for key, value in options.items():
        if key not in optimizer.bounds:
            raise InputError(f"refill: expected options among {', '.join(optimizer.bounds)}, got {key}={value!r}")
        optimizer._settled(key, value)
        if any(is_row(part) for part in as_tuple(value)):
            raise InputError(f"refill: {key}: expected the number of one model, got {value!r}")
    plains: dict[torch.Tensor, Entries] = {}
    numbers = [dict(options) for _ in optimizer.param_groups]
    if state is not None:
        plains = _plain_entries("state", optimizer, state, model)
        for own, saved in zip(numbers, state["param_groups"], strict=True):
            for key in optimizer.bounds:
                if key in saved and key not in own:
                    own[key] = number_of(saved[key])
                    optimizer._settled(key, own[key])
    return plains, numbers


def refill(optimizer: FusedOptimizer, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    """See `FusedOptimizer.refill`."""
    plains, numbers = checked_refill(optimizer, model, state, options)
    # All of it fits: from here on nothing is refused.
    optimizer.count_per_model()
    together = len({tuple(number_of(own.get(key)) for key in optimizer.counters) for own in plains.values()}) < 2
    for group, own, params in zip(optimizer.param_groups, numbers, params_of(optimizer, model), strict=True):
        for key, value in own.items():
            optimizer.set_for_model(group, key, model, value)
        for p in params:
            if optimizer._slots[p] is not None:
                optimizer.state.pop(p, None)
            if plains.get(p) or p in optimizer.state:
                _put(optimizer, group, p, model, plains.get(p, {}), together)
    rejoin(optimizer)


def structure(optimizer: FusedOptimizer) -> list[Any]:
    """The tensors of the state and the numbers of the groups: where they are the same, only values have changed."""
    numbers = [part for group in optimizer.param_groups for key in optimizer.bounds for part in as_tuple(group[key])]
    return [*numbers, *(value for entries in optimizer.state.values() for value in entries.values())]


def is_same_structure(first: list[Any], second: list[Any]) -> bool:
    """Whether `structure` gave the same tensors, and numbers in the same places."""
    return len(first) == len(second) and all(
        one is other or type(one) is type(other) is float for one, other in zip(first, second, strict=True)
    )


def _put(
    optimizer: FusedOptimizer, group: dict[str, Any], p: torch.Tensor, model: int, own: Entries, together: bool = False
) -> None:
    """Write one model's plain state into that of a parameter, whose counters are shared where all go `together`."""
    state = optimizer.state[p]
    fresh: Entries = {}
    optimizer.complete(p, group, fresh, {})
    for key, value in fresh.items():
        if key not in state:
            state[key] = value
        elif key in optimizer.counters and not together:  # until they are joined again
            state[key] = state[key].clone()
        given = own.get(key, 1.0 if key == "step" and own else None)  # torch's SGD has a state without a count
        own_part, fresh_part = (
            each[model] if _has_rows(optimizer, p, key, each) else each for each in (state[key], value)
        )
        own_part.copy_(fresh_part if given is None else torch.as_tensor(given))


def _plain_entries(what: str, optimizer: FusedOptimizer, state: Mapping[str, Any], model: int) -> dict[Any, Entries]:
    """For each parameter that has one its plain state, checked against the parameter's shape."""
    params = params_of(optimizer, model)
    check_groups(what, state["param_groups"], params)
    found: dict[Any, Entries] = {}
    for group, own in zip(state["param_groups"], params, strict=True):
        for index, p in zip(group["params"], own, strict=True):
            found[p] = {key: value for key, value in state["state"].get(index, {}).items() if value is not None}
            shape = p.shape[1:] if optimizer._slots[p] is None else p.shape
            for key, value in found[p].items():
                if key not in optimizer.counters and isinstance(value, torch.Tensor) and value.shape != shape:
                    raise InputError(
                        f"{what}: {key} of parameter {index}: expected shape {tuple(shape)}, got {tuple(value.shape)}"
                    )
    return found


def _fused_options(optimizer: FusedOptimizer, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The options of B plain groups as those of a fused one; what only plain optimizers have is left out."""
    for key in groups[0]:
        if key in ("params", "param_names") or any(key not in group for group in groups):
            continue
        values = [number_of(group[key]) for group in groups]
        same = all(value == values[0] for value in values)
        if key in optimizer.bounds:
            joined = values[0] if same else tuple(map(list, zip(*values, strict=True))) if key == "betas" else values
            optimizer._settled(key, joined)
            yield key, joined
        elif key in optimizer.defaults:
            if not same:
                raise InputError(f"{key}: expected the same for all models of a group, got {values!r}")
            yield key, values[0]
        elif all(isinstance(value, float) for value in values):  # what schedulers keep there
            yield key, values[0] if same else per_model(values)


# ---------------------------------------- some of the models


def select_models(optimizer: FusedOptimizer, models: Sequence[int], params: Iterable[torch.Tensor] | None) -> None:
    """See `FusedOptimizer.select_models`."""
    chosen = [optimizer.checked_model(model) for model in models]
    if not chosen:
        raise InputError("models: expected at least one model to keep, got none")
    if len(set(chosen)) < len(chosen):
        raise InputError(f"models: expected each model at most once, got {chosen}")
    slots = optimizer._slots
    old = [[p for p in group["params"] if slots[p] in (None, *chosen)] for group in optimizer.param_groups]
    flat = [p for group in old for p in group]
    new = flat if params is None else list(params)
    if len(new) != len(flat):
        raise InputError(f"params: expected {len(flat)} parameters for models {chosen}, got {len(new)}")
    now: dict[torch.Tensor, int | None] = {}
    state: dict[torch.Tensor, Entries] = {}
    for place, (was, p) in enumerate(zip(flat, new, strict=True)):
        slot = slots[was]
        shape = tuple(was.shape) if slot is not None else (len(chosen), *was.shape[1:])
        if tuple(p.shape) != shape:
            raise InputError(f"params: expected parameter {place} to have shape {shape}, got {tuple(p.shape)}")
        now[p] = None if slot is None else chosen.index(slot)
        if entries := optimizer.state.get(was):
            state[p] = {
                key: _some(value, chosen) if _has_rows(optimizer, was, key, value) else value
                for key, value in entries.items()
            }
    rest = iter(new)
    for group, kept in zip(optimizer.param_groups, old, strict=True):
        if "param_names" in group:
            group["param_names"] = _names_of(group, kept)
        for key in group.keys() - {"params", "param_names"}:
            parts = tuple(_some(part, chosen) for part in as_tuple(group[key]))
            group[key] = parts if type(group[key]) is tuple else parts[0]
        group["params"] = [next(rest) for _ in kept]
    optimizer._slots = Slots(len(chosen), now)
    optimizer._frozen = [optimizer._frozen[model] for model in chosen]
    optimizer.state.clear()
    optimizer.state.update(state)
    rejoin(optimizer)


def _has_rows(optimizer: FusedOptimizer, p: torch.Tensor, key: str, value: torch.Tensor) -> bool:
    """Whether an entry of a parameter's state has a row for each model."""
    return value.dim() > 0 and (optimizer._slots[p] is None or key in optimizer.counters)


def _some(value: Any, models: Sequence[int]) -> Any:
    """The rows of these models, of what has any."""
    if not (isinstance(value, torch.Tensor) and value.dim()):
        return value
    found = plain(value).index_select(0, torch.tensor(models, device=value.device))
    return found.as_subclass(PerModel) if isinstance(value, PerModel) else found


def _one(value: Any, model: int) -> Any:
    """The part of a group's value that belongs to one model."""
    if type(value) is tuple:
        return tuple(_one(part, model) for part in value)
    return plain(value)[model].item() if isinstance(value, torch.Tensor) and value.dim() == 1 else value


def _names_of(group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> list[str]:
    mine = set(params)
    return [name for p, name in zip(group["params"], group["param_names"], strict=True) if p in mine]


def number_of(value: Any) -> Any:
    """A tensor of one element as a Python number; anything else as it stands."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# ---------------------------------------- fused state dicts


def check_fits(state_dict: Mapping[str, Any], optimizer: FusedOptimizer) -> None:
    """Check a fused state dict against the optimizer that is to load it, before anything is changed."""
    total = optimizer.num_models
    saved = state_dict.get("hocket", {}).get("num_models", total)
    if saved != total:
        raise InputError(f"state_dict: expected one of {total} models, got one of {saved}")
    groups = state_dict["param_groups"]
    check_groups("state_dict", groups, [group["params"] for group in optimizer.param_groups])
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in optimizer.bounds:
            for part in as_tuple(group.get(key)):
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
