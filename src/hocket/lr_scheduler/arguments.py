"""Arguments of schedulers, one for all models or one for each, by the signature and the annotations of torch's."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import InputError
from hocket.optim.base import FusedOptimizer
from hocket.optim.hyper import Bound, check_whole, is_number, is_row, one_of, row

Place = tuple[int, int]  # a model, and the number of a parameter group

LEAST = {"total_iters": 0, "patience": 0, "cooldown": 0, "milestones": 0}  # other whole numbers are at least 1
BOUNDS = {
    **dict.fromkeys(("base_lr", "max_lr"), Bound()),
    **dict.fromkeys(("pct_start", "start_factor", "end_factor", "factor"), Bound(0, 1, closed=True)),
    **dict.fromkeys(("div_factor", "final_div_factor"), Bound(1e-300)),
    "ReduceLROnPlateau.factor": Bound(0, 1),
}


def checked(torch_class: type[LRScheduler], name: str, value: Any) -> Any:
    """An argument of one scheduler, as torch takes it, or an `InputError`. None, for a default, as it stands."""
    kind = inspect.formatannotation(inspect.signature(torch_class).parameters[name].annotation)
    if value is None and "None" in kind:
        return value
    if "Literal" in kind:
        return one_of(name, value, re.findall(r"'(\w+)'", kind))
    if "Callable" in kind:
        return _passes(callable(value), name, "a function of the epoch", value)
    if "Iterable[int]" in kind or "list[int]" in kind:
        listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        return [check_whole(name, epoch, LEAST[name]) for epoch in _passes(listed, name, "epochs in a list", value)]
    if "bool" in kind:
        return _passes(isinstance(value, bool), name, "True or False", value)
    if "int" in kind:
        return check_whole(name, value, LEAST.get(name, 1))
    bound = BOUNDS.get(f"{torch_class.__name__}.{name}") or BOUNDS.get(name) or Bound(-math.inf)
    return float(_passes(is_number(value) and bound.holds(float(value)), name, f"a number{bound.range}", value))


def bound(torch_class: type[LRScheduler], arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of a torch scheduler, with its defaults, all but the optimizer."""
    signature = inspect.signature(torch_class)
    own = [parameter for name, parameter in signature.parameters.items() if name != "optimizer"]
    found = signature.replace(parameters=own).bind(*arguments, **named)
    found.apply_defaults()
    return found.arguments


def by_place(
    torch_class: type[LRScheduler], values: Mapping[str, Any], optimizer: FusedOptimizer
) -> dict[Place, dict[str, Any]]:
    """For each model and group of an optimizer the arguments of its scheduler, or an `InputError`."""
    groups, models = len(optimizer.param_groups), optimizer.num_models
    rows = {
        name: [[checked(torch_class, name, element) for element in own] for own in _rows(name, value, groups, models)]
        for name, value in values.items()
    }
    return {
        (model, group): {name: each[group][model] for name, each in rows.items()}
        for model, group in itertools.product(range(models), range(groups))
    }


def for_each(name: str, value: Any, num_models: int) -> list[float]:
    """The argument of a step, one number for all models or B of them, as B floats."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (list, tuple)) or getattr(value, "shape", ()) not in ((), (1,)):
        return [float(each) for each in row(name, value, num_models)]
    try:
        return [float(value)] * num_models
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a number, or one for each model, got {value!r}") from None


def _rows(name: str, value: Any, groups: int, models: int) -> list[list[Any]]:
    """An argument, one for all, B, or for each group one or B, by group and model."""
    if name == "milestones":  # a list for all models, or B lists
        epochs = list(value)
        each = any(is_row(element) or isinstance(element, set) for element in epochs)
        return [row(name, epochs, models, "a list") if each else [epochs] * models] * groups
    if not is_row(value):
        return [[value] * models] * groups
    if any(is_row(element) for element in value):
        if len(value) != groups:
            raise InputError(f"{name}: expected a list for each of {groups} groups, got {len(value)}: {value!r}")
        return [row(name, inner, models) if is_row(inner) else [inner] * models for inner in value]
    return [row(name, value, models, "a number" if all(map(is_number, value)) else "a value")] * groups


def _passes(holds: bool, name: str, what: str, value: Any) -> Any:
    if not holds:
        raise InputError(f"{name}: expected {what}, got {value!r}")
    return value
