"""Changing which models an optimizer is of: some are kept, in another order, or another one takes a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.carry import check_groups, copied, number_of, params_of, plain_entries, put
from hocket.fusion.optim.hyper import PerModel, plain
from hocket.fusion.optim.model_state import ModelState
from hocket.fusion.optim.slots import Slots
from hocket.fusion.optim.step_counts import per_count, rejoin

__all__ = ["refill", "select_models"]


def select_models(optimizer: ModelState, models: Sequence[int], params: Iterable[torch.Tensor] | None) -> None:
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


def refill(optimizer: ModelState, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    """See `FusedOptimizer.refill`."""
    for key, value in options.items():
        if key not in optimizer.bounds:
            raise InputError(f"refill: expected options among {', '.join(optimizer.bounds)}, got {key}={value!r}")
        optimizer._settled(key, value, torch.device("cpu"))
        if any(isinstance(part, (list, torch.Tensor)) for part in (value if isinstance(value, tuple) else (value,))):
            raise InputError(f"refill: {key}: expected the number of one model, got {value!r}")
    params = params_of(optimizer, model)
    plain_states: dict[torch.Tensor, dict[str, Any]] = {}
    per_group: list[dict[str, Any]] = [dict(options) for _ in params]
    if state is not None:
        check_groups("state", state["param_groups"], params)
        plain_states = dict(plain_entries("state", optimizer, state, params))
        for numbers, saved in zip(per_group, state["param_groups"], strict=True):
            own = {key: number_of(saved[key]) for key in optimizer.bounds if key in saved and key not in numbers}
            for key, value in own.items():
                optimizer._settled(key, value, torch.device("cpu"))
            numbers.update(own)
    # All of it fits: from here on nothing is refused.
    optimizer.count_per_model()
    for group, mine, numbers in zip(optimizer.param_groups, params, per_group, strict=True):
        for key, value in numbers.items():
            optimizer.set_for_model(group, key, model, value)
        for p in mine:
            _begin_anew(optimizer, group, p, model, plain_states.get(p, {}))
    rejoin(optimizer.param_groups, optimizer.state)
    optimizer.unfreeze(model)


def _begin_anew(
    optimizer: ModelState, group: dict[str, Any], p: torch.Tensor, model: int, own: Mapping[str, Any]
) -> None:
    if optimizer._slots[p] is not None:
        optimizer.state.pop(p, None)
        if own:
            optimizer.state[p] = {key: copied(value, p, key) for key, value in own.items()}
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
        state["step"][model] = float(number_of(own.get("step", 0.0)))
    for key, value in fresh.items():
        if key != "step":
            if key not in state:
                state[key] = torch.zeros_like(value)
            state[key][model] = value[model]
    put(state, model, own)
    optimizer.tidy_state(state)
