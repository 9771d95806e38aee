"""The state of a fused optimizer by models: a plain state of each is put into its slot, and slots are taken out.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

`plain_state` takes one model's out, `refill` puts one into a slot, `load` one into each. `select` keeps some of the
models. A plain state dict numbers its parameters as torch does: in the order of the groups, those of one model only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import InputError
from hocket.optim.counts import FLAGS, count_dtype
from hocket.optim.hyper import PerModel, as_tuple, by_model, from_models, is_row, of_model, plain
from hocket.optim.slots import Slots

if TYPE_CHECKING:
    from hocket.optim.base import FusedOptimizer

__all__ = ["PlainState", "check_fits", "checked_refill", "exchange", "load", "plain_state", "refill", "select"]

Entries = dict[str, Any]


@dataclass(frozen=True)
class PlainState:
    """A slot's new state: for each group the entries of its parameters' plain states, and the plain options."""

    entries: Sequence[Sequence[Entries]]
    options: Sequence[Mapping[str, Any]]


def plain_state(optimizer: FusedOptimizer, model: int) -> dict[str, Any]:
    """The plain state dict of one model. Shares no memory with the fused one."""
    template = optimizer.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group, params in zip(optimizer.param_groups, _params_of(optimizer, model), strict=True):
        optimizer.settle(group)
        own = {key: of_model(value, model) for key, value in group.items() if key not in ("params", "param_names")}
        numbers = list(range(count, count + len(params)))
        count += len(params)
        groups.append({**template, **own, "params": numbers, **_names_of(group, params)})
        for number, p in zip(numbers, params, strict=True):
            copies = {
                key: row.to("cpu", count_dtype(), copy=True) if key == "step" else row.clone()
                for key, row in _rows_of(optimizer, p, model).items()
            }
            if copies and (found := optimizer.plain_state(copies, own)):
                state[number] = found
    return {"state": state, "param_groups": groups}


def checked_refill(
    optimizer: FusedOptimizer, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> PlainState:
    """A slot's new state, from a plain state and options or afresh, checked."""
    for key, value in options.items():
        if key not in optimizer.bounds:
            raise InputError(f"refill: expected options among {', '.join(optimizer.bounds)}, got {key}={value!r}")
    new = _checked(optimizer, model, state, options, "state")
    for own in new.options:
        for key in own.keys() & optimizer.bounds.keys():
            if any(map(is_row, as_tuple(own[key]))):
                raise InputError(f"refill: {key}: expected the number of one model, got {own[key]!r}")
    _merged(optimizer, {model: new})
    return new


def refill(optimizer: FusedOptimizer, model: int, new: PlainState) -> None:
    """Write what `checked_refill` gave into a slot. What the state does not have begins anew."""
    before = _tensors(optimizer)
    optimizer.count_per_model()
    _put(optimizer, {model: new})
    optimizer.share_all_counts()
    if list(map(id, before)) != list(map(id, _tensors(optimizer))):
        optimizer._hocket_version += 1
    if optimizer.frozen[model]:
        optimizer.unfreeze(model)


def load(optimizer: FusedOptimizer, states: Sequence[Mapping[str, Any]]) -> None:
    """See `FusedOptimizer.load_unfused`."""
    new = {m: _checked(optimizer, m, state, {}, f"state of model {m}") for m, state in enumerate(states)}
    _merged(optimizer, new)  # all of it fits, before the state is cleared
    steps_apart, optimizer._per_model_steps = optimizer._per_model_steps, True
    optimizer.state.clear()
    _put(optimizer, new)
    optimizer._per_model_steps = steps_apart
    for state in () if steps_apart else optimizer.state.values():
        step = state.get("step")
        if step is not None and step.dim() and bool((step == step[0]).all()):
            state["step"] = torch.tensor(step[0].item(), dtype=count_dtype())
    optimizer.share_all_counts()


def _merged(optimizer: FusedOptimizer, new: Mapping[int, PlainState]) -> list[dict[str, list[Any]]]:
    """For each group the checked options by model, with these slots' values and schedulers' notes."""
    merged = []
    for number, group in enumerate(optimizer.param_groups):
        optimizer.settle(group)
        options = {model: each.options[number] for model, each in new.items()}
        values: dict[str, list[Any]] = {}
        for key in set.intersection(*(set(own) for own in options.values())):
            is_note = len(new) == optimizer.num_models and all(isinstance(own[key], float) for own in options.values())
            if is_note or key in optimizer.bounds or key in FLAGS:
                row = by_model(group.get(key), optimizer.num_models)
                values[key] = [options[model][key] if model in options else was for model, was in enumerate(row)]
            if key in optimizer.bounds:
                optimizer.settled(key, from_models(values[key]))
            elif key in FLAGS and any(value != values[key][0] for value in values[key]):
                raise InputError(f"{key}: expected the same for all models of a group, got {values[key]!r}")
        merged.append(values)
    return merged


def _checked(
    optimizer: FusedOptimizer, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any], what: str
) -> PlainState:
    """A plain state's entries, checked against the parameters' shapes, and its options, overridden by these."""
    params = _params_of(optimizer, model)
    if state is None:
        return PlainState([[{} for _ in own] for own in params], [options for _ in params])
    _check_state(optimizer, what, state, params, is_plain=True)
    groups = [{**group, **options} for group in state["param_groups"]]
    own = {
        index: {key: each for key, each in given.items() if each is not None} for index, given in state["state"].items()
    }
    entries = [[own.get(index, {}) for index in group["params"]] for group in groups]
    return PlainState(entries, [{key: number_of(each) for key, each in group.items()} for group in groups])


def _put(optimizer: FusedOptimizer, new: Mapping[int, PlainState]) -> None:
    """Write into slots what they get."""
    for group, values in zip(optimizer.param_groups, _merged(optimizer, new), strict=True):
        for key, row in values.items():
            if row != by_model(group.get(key), optimizer.num_models):
                optimizer.set_by_model(group, key, row)
    for model, each in new.items():
        _put_entries(optimizer, model, each.entries)


def _put_entries(optimizer: FusedOptimizer, model: int, entries: Sequence[Sequence[Entries]]) -> None:
    """Write one model's plain entries into its rows. Counters stay shared where all of its parameters are in step."""
    flat = [own for group in entries for own in group]
    in_step = len({tuple(number_of(own.get(key)) for key in optimizer.counters) for own in flat}) < 2
    rows: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for group, params, given in zip(optimizer.param_groups, _params_of(optimizer, model), entries, strict=True):
        options = {key: of_model(group[key], model) for key in optimizer.bounds}
        for p, own in zip(params, given, strict=True):
            if optimizer._slots[p] is not None:
                optimizer.state.pop(p, None)
            if not own and p not in optimizer.state:
                continue
            state = optimizer.state[p]
            optimizer.complete(p, group, state)
            for key in () if in_step else optimizer.counters:
                if key in state:
                    state[key] = state[key].clone()  # until they are joined again
            for key, row in _rows_of(optimizer, p, model).items():
                if key in optimizer.counters:
                    # torch's SGD has a state without a count.
                    row.fill_(number_of(own.get(key, 1.0 if key == "step" and own else optimizer.counters[key])))
                else:
                    rows.append(row)
                    values.append(torch.as_tensor(own[key]) if key in own else optimizer.initial(key, row, options))
    if rows:
        torch._foreach_copy_(rows, values)


def _tensors(optimizer: FusedOptimizer) -> list[torch.Tensor]:
    """The tensors of the groups and of the state: where they are the same ones, only values have changed."""
    parts = [part for group in optimizer.param_groups for key in optimizer.bounds for part in as_tuple(group[key])]
    entries = [value for state in optimizer.state.values() for value in state.values()]
    return [each for each in (*parts, *entries) if isinstance(each, torch.Tensor)]


def select(optimizer: FusedOptimizer, models: Sequence[int], params: Iterable[torch.Tensor] | None) -> None:
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
                key: _rows(value, chosen) if slot is None or key in optimizer.counters else value
                for key, value in entries.items()
            }
    rest = iter(new)
    for group, kept in zip(optimizer.param_groups, old, strict=True):
        group.update(_names_of(group, kept))
        for key in group.keys() - {"params", "param_names"}:
            parts = tuple(_rows(part, chosen) for part in as_tuple(group[key]))
            group[key] = parts if type(group[key]) is tuple else parts[0]
        group["params"] = [next(rest) for _ in kept]
    optimizer._slots = Slots(len(chosen), now)
    optimizer._frozen = [optimizer._frozen[model] for model in chosen]
    optimizer.state.clear()
    optimizer.state.update(state)
    optimizer.share_all_counts()


def exchange(optimizer: FusedOptimizer, new: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Let other parameters take the places of some, each of the same model. Their states begin anew."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    slots = optimizer._slots
    optimizer._slots = Slots(slots.num_models, {new.get(p, p): slot for p, slot in slots.items()})
    for p in new:
        optimizer.state.pop(p, None)
    optimizer._hocket_version += 1


def check_fits(state_dict: Mapping[str, Any], optimizer: FusedOptimizer) -> None:
    """Check a fused state dict against the optimizer that is to load it, before anything is changed."""
    total = optimizer.num_models
    if not {"state", "param_groups"} <= state_dict.keys():
        raise InputError(f"state_dict: expected 'state' and 'param_groups', got {', '.join(state_dict) or 'nothing'}")
    saved = state_dict.get("hocket", {}).get("num_models", total)
    if saved != total:
        raise InputError(f"state_dict: expected one of {total} models, got one of {saved}")
    _check_state(optimizer, "state_dict", state_dict, [group["params"] for group in optimizer.param_groups])
    for number, group in enumerate(state_dict["param_groups"]):
        for key in optimizer.bounds:
            for part in as_tuple(group[key]):
                if isinstance(part, torch.Tensor) and part.dim() == 1 and len(part) != total:
                    raise InputError(f"state_dict: {key} of group {number}: expected {total} numbers, got {len(part)}")


def _check_state(
    optimizer: FusedOptimizer,
    what: str,
    state: Mapping[str, Any],
    params: Sequence[Sequence[torch.Tensor]],
    is_plain: bool = False,
) -> None:
    """Check groups, names of options, entries and their shapes of a state dict, of one model or of all."""
    kind, groups = type(optimizer).__name__, state["param_groups"]
    found, expected = [len(group["params"]) for group in groups], list(map(len, params))
    if found != expected:
        raise InputError(f"{what}: expected groups of {expected} parameters, got groups of {found}")
    # The tensors that a parameter's state may hold, under any options.
    known = optimizer.entries({**dict.fromkeys(optimizer.bounds, 1.0), **dict.fromkeys(FLAGS, True)})
    for number, (group, own) in enumerate(zip(groups, params, strict=True)):
        if missing := [key for key in optimizer.bounds if key not in group]:
            raise InputError(f"{what}: expected the options of {kind}, got group {number} without {', '.join(missing)}")
        for index, p in zip(group["params"], own, strict=True):
            shape = p.shape[1:] if is_plain and optimizer._slots[p] is None else p.shape
            for key, value in state["state"].get(index, {}).items():
                place = f"{what}: {key} of parameter {index}"
                if key not in (*known, *optimizer.counters):
                    raise InputError(f"{place}: expected the state of {kind}: {', '.join(known)}")
                if key in known and isinstance(value, torch.Tensor) and value.shape != shape:
                    raise InputError(f"{place}: expected shape {tuple(shape)}, got {tuple(value.shape)}")


def _params_of(optimizer: FusedOptimizer, model: int) -> list[list[torch.Tensor]]:
    """For each group the parameters that model has a part in."""
    slots = optimizer._slots
    return [[p for p in group["params"] if slots[p] in (None, model)] for group in optimizer.param_groups]


def _names_of(group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> dict[str, list[str]]:
    """The names of some of a group's parameters, where they have names."""
    mine, names = set(params), group.get("param_names")
    if names is None:
        return {}
    return {"param_names": [name for p, name in zip(group["params"], names, strict=True) if p in mine]}


def _rows_of(optimizer: FusedOptimizer, p: torch.Tensor, model: int) -> Entries:
    """One model's part of a parameter's state."""
    is_fused, counters = optimizer._slots[p] is None, optimizer.counters
    return {
        key: value[model] if value.dim() and (is_fused or key in counters) else value
        for key, value in optimizer.state.get(p, {}).items()
    }


def _rows(value: Any, models: Sequence[int]) -> Any:
    """The rows of these models, of what has any."""
    if not (isinstance(value, torch.Tensor) and value.dim()):
        return value
    found = plain(value).index_select(0, torch.tensor(models, device=value.device))
    return found.as_subclass(PerModel) if isinstance(value, PerModel) else found


def number_of(value: Any) -> Any:
    """A tensor of one element as a Python number, or anything else as it stands."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
