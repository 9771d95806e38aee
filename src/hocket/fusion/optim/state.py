"""The state of a fused optimizer by models: a plain state of each, put into slots; some of the slots.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

`plain_state` takes one model's out. `checked_states` reads plain states, of one slot (a refill) or of all (a load), and
`put` writes what it found. `select` keeps some of the models. A plain state dict numbers its parameters as torch does:
in the order of the groups, those of one model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.counts import count_dtype, rejoin
from hocket.fusion.optim.hyper import PerModel, as_tuple, by_model, from_models, is_row, plain
from hocket.fusion.optim.options import FLAGS
from hocket.fusion.optim.slots import Slots

if TYPE_CHECKING:
    from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["StatesOfModels", "check_fits", "checked_states", "exchange", "is_same_structure", "plain_state", "put"]
__all__ += ["select", "structure"]

Entries = dict[str, Any]


@dataclass(frozen=True)
class StatesOfModels:
    """What slots get: for each model its parameters' plain states, and for each group of options all models' values."""

    entries: Mapping[int, Mapping[torch.Tensor, Entries]]
    options: Sequence[Mapping[str, list[Any]]]
    are_all: bool  # whether nothing is to be left of what was there


def plain_state(optimizer: FusedOptimizer, model: int) -> dict[str, Any]:
    """The plain state dict of one model; shares no memory with the fused one."""
    template = optimizer.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group, params in zip(optimizer.param_groups, _params_of(optimizer, model), strict=True):
        optimizer.settle(group)
        own = {
            key: by_model(value, optimizer.num_models)[model]
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        numbers = list(range(count, count + len(params)))
        count += len(params)
        groups.append({**template, **own, "params": numbers, **_names_of(group, params)})
        for number, p in zip(numbers, params, strict=True):
            entries = _mapped(optimizer, p, optimizer.state.get(p, {}), lambda rows: rows[model])
            copies = {
                key: value.to("cpu", count_dtype(), copy=True) if key == "step" else value.clone()
                for key, value in entries.items()
            }
            if copies and (found := optimizer.plain_state(copies, own)):
                state[number] = found
    return {"state": state, "param_groups": groups}


def checked_states(
    optimizer: FusedOptimizer, states: Mapping[int, Mapping[str, Any] | None], options: Mapping[str, Any] | None = None
) -> StatesOfModels:
    """What slots get from plain states, or begin anew with where that is None; nothing is changed yet.

    Args:
        optimizer: of these slots.
        states: by the numbers of the slots.
        options: of a refill, numbers that go before those of the states; without, the states of all models are loaded.

    Raises:
        InputError: a state or a number does not fit the parameters, the bounds or the other models.
    """
    for key, value in (options or {}).items():
        if key not in optimizer.bounds:
            raise InputError(f"refill: expected options among {', '.join(optimizer.bounds)}, got {key}={value!r}")
        if any(map(is_row, as_tuple(value))):
            raise InputError(f"refill: {key}: expected the number of one model, got {value!r}")
    entries: dict[int, Mapping[torch.Tensor, Entries]] = {model: {} for model in states}
    saved: list[dict[str, dict[int, Any]]] = [{} for _ in optimizer.param_groups]
    for model, state in states.items():
        if state is not None:
            what = f"state of model {model}" if options is None else "state"
            entries[model] = _entries_of(optimizer, model, state, what)
        for number, own in enumerate(saved):
            group = {} if state is None else state["param_groups"][number]
            for key, value in {**group, **(options or {})}.items():
                own.setdefault(key, {})[model] = number_of(value)
    found = [_options_of(optimizer, *each) for each in zip(optimizer.param_groups, saved, strict=True)]
    return StatesOfModels(entries, found, are_all=options is None)


def _options_of(
    optimizer: FusedOptimizer, group: dict[str, Any], saved: Mapping[str, Mapping[int, Any]]
) -> dict[str, list[Any]]:
    """The values by model of a group's options where some are replaced; what only plain optimizers have is left out."""
    optimizer.settle(group)
    found = {}
    total = optimizer.num_models
    for key, new in saved.items():
        is_note = len(new) == total and all(isinstance(value, float) for value in new.values())  # of a scheduler
        if key in (*optimizer.bounds, *FLAGS):
            values = [new.get(model, old) for model, old in enumerate(by_model(group[key], total))]
            if key in optimizer.bounds:
                optimizer.settled(key, from_models(values))
            elif any(value != values[0] for value in values):
                raise InputError(f"{key}: expected the same for all models of a group, got {values!r}")
            found[key] = values
        elif is_note:
            found[key] = [new[model] for model in range(total)]
    return found


def _entries_of(
    optimizer: FusedOptimizer, model: int, state: Mapping[str, Any], what: str
) -> dict[torch.Tensor, Entries]:
    """For each parameter of a model its plain state, checked against the parameter's shape."""
    params = _params_of(optimizer, model)
    _check_groups(optimizer, what, state["param_groups"], params)
    found: dict[torch.Tensor, Entries] = {}
    for group, own in zip(state["param_groups"], params, strict=True):
        for index, p in zip(group["params"], own, strict=True):
            found[p] = {key: value for key, value in state["state"].get(index, {}).items() if value is not None}
            shape = p.shape[1:] if optimizer._slots[p] is None else p.shape
            _check_entries(optimizer, f"{what}: {{}} of parameter {index}", found[p], shape)
    return found


def put(optimizer: FusedOptimizer, new: StatesOfModels) -> None:
    """Write what `checked_states` gave into the slots."""
    steps_apart = optimizer._per_model_steps
    if new.are_all:
        optimizer.state.clear()
        optimizer._per_model_steps = True
    else:
        optimizer.count_per_model()
    for group, options in zip(optimizer.param_groups, new.options, strict=True):
        for key, values in options.items():
            optimizer.set_by_model(group, key, values)
    for model, entries in new.entries.items():
        together = len({tuple(number_of(own.get(key)) for key in optimizer.counters) for own in entries.values()}) < 2
        for group, params in zip(optimizer.param_groups, _params_of(optimizer, model), strict=True):
            for p in params:
                if optimizer._slots[p] is not None:
                    optimizer.state.pop(p, None)
                if entries.get(p) or p in optimizer.state:
                    _put_entries(optimizer, group, p, model, entries.get(p, {}), together)
    if new.are_all and not steps_apart:
        optimizer._per_model_steps = False
        for own in optimizer.state.values():
            step = own.get("step")
            if step is not None and step.dim() and bool((step == step[0]).all()):
                own["step"] = torch.tensor(step[0].item(), dtype=count_dtype())
    rejoin(optimizer)


def _put_entries(
    optimizer: FusedOptimizer, group: dict[str, Any], p: torch.Tensor, model: int, own: Entries, together: bool
) -> None:
    """Write one model's plain state into that of a parameter, whose counters stay shared where all go `together`."""
    state = optimizer.state[p]
    fresh: Entries = {}
    optimizer.complete(p, group, fresh, {})
    for key, value in fresh.items():
        if key not in state:
            state[key] = value
        elif key in optimizer.counters and not together:  # until they are joined again
            state[key] = state[key].clone()
    rows, begin = (
        _mapped(optimizer, p, entries, lambda each: each[model])
        for entries in ({key: state[key] for key in fresh}, fresh)
    )
    for key, row in rows.items():
        given = own.get(key, 1.0 if key == "step" and own else None)  # torch's SGD has a state without a count
        row.copy_(begin[key] if given is None else torch.as_tensor(given))


def structure(optimizer: FusedOptimizer) -> list[Any]:
    """The tensors of the state and the numbers of the groups: where they are the same, only values have changed."""
    numbers = [part for group in optimizer.param_groups for key in optimizer.bounds for part in as_tuple(group[key])]
    return [*numbers, *(value for entries in optimizer.state.values() for value in entries.values())]


def is_same_structure(first: list[Any], second: list[Any]) -> bool:
    """Whether `structure` gave the same tensors, and numbers in the same places."""
    return len(first) == len(second) and all(
        one is other or type(one) is type(other) is float for one, other in zip(first, second, strict=True)
    )


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
            state[p] = _mapped(optimizer, was, entries, lambda rows: _rows(rows, chosen))
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
    rejoin(optimizer)


def exchange(optimizer: FusedOptimizer, new: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Let other parameters take the places of some, each of the same model; their states begin anew."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    slots = optimizer._slots
    optimizer._slots = Slots(slots.num_models, {new.get(p, p): slots[p] for p in slots})
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
    groups = state_dict["param_groups"]
    _check_groups(optimizer, "state_dict", groups, [group["params"] for group in optimizer.param_groups])
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in optimizer.bounds:
            for part in as_tuple(group.get(key)):
                if isinstance(part, torch.Tensor) and part.dim() == 1 and len(part) != total:
                    raise InputError(f"state_dict: {key} of group {number}: expected {total} numbers, got {len(part)}")
        for index, p in zip(group["params"], own["params"], strict=True):
            entries = state_dict["state"].get(index, {})
            _check_entries(optimizer, f"state_dict: {{}} of parameter {index}", entries, p.shape)


def _check_groups(
    optimizer: FusedOptimizer, what: str, groups: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Any]]
) -> None:
    """Check that a state dict has as many groups, each of as many parameters and with this optimizer's options."""
    found = [len(group["params"]) for group in groups]
    expected = [len(group) for group in params]
    if found != expected:
        raise InputError(f"{what}: expected groups of {expected} parameters, got groups of {found}")
    for number, group in enumerate(groups):
        if missing := [key for key in optimizer.bounds if key not in group]:
            kind = type(optimizer).__name__
            raise InputError(f"{what}: expected the options of {kind}, got group {number} without {', '.join(missing)}")


def _check_entries(optimizer: FusedOptimizer, what: str, entries: Entries, shape: torch.Size) -> None:
    known = optimizer.entries({**dict.fromkeys(optimizer.bounds, 1.0), **dict.fromkeys(FLAGS, True)})
    for key, value in entries.items():
        if key not in (*known, *optimizer.counters):
            raise InputError(
                f"{what.format(key)}: expected the state of {type(optimizer).__name__}: {', '.join(known)}"
            )
        if key not in optimizer.counters and isinstance(value, torch.Tensor) and value.shape != shape:
            raise InputError(f"{what.format(key)}: expected shape {tuple(shape)}, got {tuple(value.shape)}")


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


def _mapped(
    optimizer: FusedOptimizer, p: torch.Tensor, entries: Entries, change: Callable[[torch.Tensor], torch.Tensor]
) -> Entries:
    """A parameter's state, of which each entry with a row for each model is changed."""
    is_fused = optimizer._slots[p] is None
    return {
        key: change(value) if value.dim() and (is_fused or key in optimizer.counters) else value
        for key, value in entries.items()
    }


def _rows(value: Any, models: Sequence[int]) -> Any:
    """The rows of these models, of what has any."""
    if not (isinstance(value, torch.Tensor) and value.dim()):
        return value
    found = plain(value).index_select(0, torch.tensor(models, device=value.device))
    return found.as_subclass(PerModel) if isinstance(value, PerModel) else found


def number_of(value: Any) -> Any:
    """A tensor of one element as a Python number; anything else as it stands."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
