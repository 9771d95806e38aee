"""Carrying optimizer state between B plain optimizers and one fused one, and between slots of fused ones.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

A plain state dict numbers its parameters as torch does: in the order of the groups, those of one model only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.hyper import PerModel, per_model, plain
from hocket.fusion.optim.slots import Slots

if TYPE_CHECKING:
    from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["are_apart", "as_list", "check_fits", "load_unfused", "part_counts", "refill", "rejoin", "take", "unfused"]

State = MutableMapping[Any, dict[str, Any]]


def count_dtype() -> torch.dtype:
    """What torch's optimizers count in."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def as_list(value: Any, num_models: int) -> list[Any]:
    """One number for all models, or a row of them, as a row in Python floats."""
    if isinstance(value, torch.Tensor):
        return [value.item()] * num_models if value.dim() == 0 else value.tolist()
    return list(value) if isinstance(value, list) else [value] * num_models


# ------------------------------------------------------------------------------------------------------ step counts


def part_counts(state: State, slots: Slots) -> None:
    """Give the fused parameters a count for each model; parameters that shared one count share the new one."""
    parted: dict[int, torch.Tensor] = {}
    for p, entries in state.items():
        step = entries.get("step")
        if step is None or step.dim() or slots[p] is not None:
            continue
        if id(step) not in parted:
            parted[id(step)] = torch.full((slots.num_models,), step.item(), dtype=torch.float64)
            parted[-id(step)] = step  # holds on to it: no other tensor may get its id
        entries["step"] = parted[id(step)]


def rejoin(groups: Sequence[dict[str, Any]], state: State) -> None:
    """Let parameters of a group that have equal counts share one, as they did before they were saved."""
    for group in groups:
        known: dict[Any, torch.Tensor] = {}
        for p in group["params"]:
            entries = state.get(p, {})
            if "step" in entries:
                step = torch.as_tensor(entries["step"]).cpu()
                entries["step"] = known.setdefault((step.dim(), *step.reshape(-1).tolist()), step)


def are_apart(state: State) -> bool:
    """Whether models count their steps on their own."""
    return any(entries["step"].dim() > 0 for entries in state.values() if "step" in entries)


def check_fits(state_dict: Mapping[str, Any], optimizer: FusedOptimizer) -> None:
    """Check a fused state dict against the optimizer that is to load it, before anything is changed."""
    total = optimizer.num_models
    saved = state_dict.get("hocket", {}).get("num_models", total)
    if saved != total:
        raise InputError(f"state_dict: expected one of {total} models, got one of {saved}")
    groups = state_dict["param_groups"]
    _check_groups("state_dict", groups, [group["params"] for group in optimizer.param_groups])
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


def _check_groups(what: str, groups: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Any]]) -> None:
    found = [len(group["params"]) for group in groups]
    expected = [len(group) for group in params]
    if found != expected:
        raise InputError(f"{what}: expected groups of {expected} parameters, got groups of {found}")


# ----------------------------------------------------------------------------------------------- to and from plain


def _params_of(optimizer: FusedOptimizer, model: int) -> list[list[torch.Tensor]]:
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


def unfused(optimizer: FusedOptimizer, model: int) -> dict[str, Any]:
    """The plain state dict of one model; shares no memory with the fused one."""
    template = optimizer.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group, params in zip(optimizer.param_groups, _params_of(optimizer, model), strict=True):
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


def load_unfused(optimizer: FusedOptimizer, states: Sequence[Mapping[str, Any]]) -> None:
    """See `FusedOptimizer.load_unfused`."""
    total = optimizer.num_models
    if len(states) != total:
        raise InputError(f"states: expected {total}, one for each model, got {len(states)}")
    entries_of: list[dict[torch.Tensor, dict[str, Any]]] = []
    for model, state in enumerate(states):
        params = _params_of(optimizer, model)
        _check_groups(f"state of model {model}", state["param_groups"], params)
        entries_of.append(dict(_entries(f"state of model {model}", optimizer, state, params)))
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
                    optimizer.state[p] = {key: _copied(value, p, key) for key, value in entries_of[slot][p].items()}
            elif any(entries.get(p) for entries in entries_of):
                optimizer.state[p] = _stacked(optimizer, p, group, [entries.get(p, {}) for entries in entries_of])
    rejoin(optimizer.param_groups, optimizer.state)
    if optimizer._apart or are_apart(optimizer.state):
        optimizer.part()


def _entries(
    what: str, optimizer: FusedOptimizer, state: Mapping[str, Any], params: Sequence[Sequence[torch.Tensor]]
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


def _fused_options(optimizer: FusedOptimizer, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The options of B plain groups as those of a fused one; what only plain optimizers have is left out."""
    for key in groups[0]:
        if key in ("params", "param_names") or any(key not in group for group in groups):
            continue
        values = [_number(group[key]) for group in groups]
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


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _copied(value: Any, p: torch.Tensor, key: str) -> Any:
    if key == "step":
        return torch.as_tensor(value, dtype=count_dtype()).detach().to("cpu", copy=True)
    return value.to(p.device, p.dtype, copy=True)


def _stacked(
    optimizer: FusedOptimizer, p: torch.Tensor, group: dict[str, Any], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """B plain states of a parameter as one; a model that has none yet begins anew."""
    found: dict[str, Any] = {}
    if optimizer.counts:
        counts = [float(_number(own.get("step", 0.0))) for own in entries]
        same = all(count == counts[0] for count in counts)
        found["step"] = torch.tensor(counts[0], dtype=count_dtype()) if same else per_count(counts)
    was, optimizer._apart = optimizer._apart, True  # each model begins on its own
    try:
        optimizer.make_state(p, group, found)
    finally:
        optimizer._apart = was
    for model, own in enumerate(entries):
        _put(found, model, own)
    optimizer.tidy_state(found)
    return found


def per_count(counts: Sequence[float]) -> torch.Tensor:
    """Step counts of B models."""
    return torch.tensor(list(counts), dtype=torch.float64)


def _put(state: dict[str, Any], model: int, own: Mapping[str, Any]) -> None:
    """Copy a model's plain state into its slices of a fused state that has all entries."""
    for key, value in own.items():
        if key != "step" and key in state and value is not None:
            state[key][model] = value.to(state[key].device)
    if "fresh" in state and "momentum_buffer" in own:
        state["fresh"][model] = False


# ---------------------------------------------------------------------------------------------------------- slots


def take(optimizer: FusedOptimizer, models: Sequence[int], params: Iterable[torch.Tensor] | None) -> None:
    """See `FusedOptimizer.take`."""
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
    for place, (was, p) in enumerate(zip(flat, new, strict=True)):
        slot = slots[was]
        shape = tuple(was.shape) if slot is not None else (len(chosen), *was.shape[1:])
        if tuple(p.shape) != shape:
            raise InputError(f"params: expected parameter {place} to have shape {shape}, got {tuple(p.shape)}")
        now[p] = None if slot is None else chosen.index(slot)
    total = slots.num_models
    state = {
        p: {key: _taken(value, chosen, total, slots[was] is None) for key, value in optimizer.state[was].items()}
        for was, p in zip(flat, new, strict=True)
        if was in optimizer.state
    }
    rest = iter(new)
    for group, kept in zip(optimizer.param_groups, old, strict=True):
        if "param_names" in group:
            names = zip(group["params"], group["param_names"], strict=True)
            mine = set(kept)
            group["param_names"] = [name for p, name in names if p in mine]
        for key, value in group.items():
            if key not in ("params", "param_names"):
                group[key] = _rows_taken(value, chosen)
        group["params"] = [next(rest) for _ in kept]
    optimizer._slots = Slots(len(chosen), now)
    optimizer._frozen = [optimizer._frozen[model] for model in chosen]
    optimizer.state.clear()
    optimizer.state.update(state)
    rejoin(optimizer.param_groups, optimizer.state)


def _taken(value: Any, models: Sequence[int], total: int, fused: bool) -> Any:
    if not (fused and isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == total):
        return value
    return value.index_select(0, torch.tensor(models, device=value.device))


def _rows_taken(value: Any, models: Sequence[int]) -> Any:
    if type(value) is tuple:
        return tuple(_rows_taken(part, models) for part in value)
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        chosen = plain(value).index_select(0, torch.tensor(models, device=value.device))
        return chosen.as_subclass(PerModel) if isinstance(value, PerModel) else chosen
    return value


def refill(optimizer: FusedOptimizer, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    """See `FusedOptimizer.refill`."""
    for key, value in options.items():
        if key not in optimizer.bounds:
            raise InputError(f"refill: expected options among {', '.join(optimizer.bounds)}, got {key}={value!r}")
        optimizer._settled(key, value, torch.device("cpu"))
        if any(isinstance(part, (list, torch.Tensor)) for part in (value if isinstance(value, tuple) else (value,))):
            raise InputError(f"refill: {key}: expected the number of one model, got {value!r}")
    params = _params_of(optimizer, model)
    plain_states: dict[torch.Tensor, dict[str, Any]] = {}
    per_group: list[dict[str, Any]] = [dict(options) for _ in params]
    if state is not None:
        _check_groups("state", state["param_groups"], params)
        plain_states = dict(_entries("state", optimizer, state, params))
        for numbers, saved in zip(per_group, state["param_groups"], strict=True):
            own = {key: _number(saved[key]) for key in optimizer.bounds if key in saved and key not in numbers}
            for key, value in own.items():
                optimizer._settled(key, value, torch.device("cpu"))
            numbers.update(own)
    # All of it fits: from here on nothing is refused.
    optimizer.part()
    for group, mine, numbers in zip(optimizer.param_groups, params, per_group, strict=True):
        for key, value in numbers.items():
            optimizer.set_for_model(group, key, model, value)
        for p in mine:
            _begin_anew(optimizer, group, p, model, plain_states.get(p, {}))
    rejoin(optimizer.param_groups, optimizer.state)
    optimizer.unfreeze(model)


def _begin_anew(
    optimizer: FusedOptimizer, group: dict[str, Any], p: torch.Tensor, model: int, own: Mapping[str, Any]
) -> None:
    if optimizer._slots[p] is not None:
        optimizer.state.pop(p, None)
        if own:
            optimizer.state[p] = {key: _copied(value, p, key) for key, value in own.items()}
        return
    state = optimizer.state.get(p, {})
    if not state and not own:
        return
    fresh: dict[str, Any] = {"step": per_count([0.0] * optimizer.num_models)} if optimizer.counts else {}
    optimizer.make_state(p, group, fresh)
    if not state:
        optimizer.state[p] = state = fresh
    if "step" in state:
        state["step"] = state["step"].clone()  # no longer that of the parameters beside it, until they are joined again
        state["step"][model] = float(_number(own.get("step", 0.0)))
    for key, value in fresh.items():
        if key != "step":
            if key not in state:
                state[key] = torch.zeros_like(value)
            state[key][model] = value[model]
    _put(state, model, own)
    optimizer.tidy_state(state)
