"""Options of an optimizer over fused parameters, frozen models, and step counts kept as torch keeps them.

all models step together      step 7        one number on the CPU, which parameters that are in step share
a model rests on its own      step (7, 6, 7)
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from hocket.errors import InputError
from hocket.optim.hyper import (
    Bound,
    Number,
    PerModel,
    as_tuple,
    by_model,
    from_models,
    is_number,
    numbers_of,
    per_model,
)
from hocket.optim.slots import Slots, largest, slots_of

KERNELS = ("foreach", "fused", "capturable", "differentiable")  # torch's choices, which here are made for the user
FLAGS = ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov")  # they choose code, not numbers


class Counted(torch.optim.Optimizer):
    """The part of `hocket.optim.base.FusedOptimizer` that keeps options and counts steps, frozen models left out."""

    bounds: ClassVar[Mapping[str, Bound]]
    counters: ClassVar[Mapping[str, float]] = {"step": 0.0}
    _slots: Slots
    _hocket_version: int
    _frozen: list[bool]
    _per_model_steps: bool  # whether each model's steps are counted on their own

    @property
    def num_models(self) -> int:
        """B, the number of models."""
        return self._slots.num_models

    def checked_model(self, model: int) -> int:
        """`model`, which must be one of ``0 ... B - 1``."""
        if isinstance(model, bool) or not isinstance(model, int) or not 0 <= model < self.num_models:
            raise InputError(f"model: expected one of 0 ... {self.num_models - 1}, got {model!r}")
        return model

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its options may be one number or B, whatever the other groups' are."""
        [group] = groups_of([param_group])
        slots = slots_of(group["params"], self.num_models, known=self._slots)
        options = {**self.defaults, **group}
        device = largest(options["params"]).device
        checked = {key: self.settled(key, value, device) for key, value in options.items() if key != "params"}
        self.check_group(checked)
        self._slots = slots
        super().add_param_group({**checked, "params": group["params"]})
        self._hocket_version += 1

    def check_group(self, group: dict[str, Any]) -> None:
        """Check what the options of a group demand of each other."""

    def set_by_model(self, group: dict[str, Any], key: str, values: list[Any]) -> None:
        """Set an option, or a scheduler's note in a group, to each model's value. One out of bounds is an `InputError`.

        Where there are B numbers already, they are set in place. One number stays one while all models have the same.
        """
        rows = as_tuple(from_models(values))
        if key in self.bounds:
            news = as_tuple(self.settled(key, from_models(values), largest(group["params"]).device))
        else:
            news = tuple(per_model(row) if is_number(row[0]) else row for row in rows)
        olds = as_tuple(group[key]) if key in group else (None,) * len(rows)
        parts = []
        for old, new, row in zip(olds, news, rows, strict=True):
            one = row[0] if row.count(row[0]) == len(row) else new
            parts.append(old.fill_(new) if isinstance(old, PerModel) else one)
        group[key] = tuple(parts) if len(parts) > 1 else parts[0]

    def set_for_model(self, group: dict[str, Any], key: str, model: int, value: Any) -> None:
        """Set an option of a group for one model, and for no other, in place where there are B numbers already."""
        values = by_model(group[key], self.num_models)
        if values[model] != value:
            values[model] = value
            self.set_by_model(group, key, values)

    def widened(self, group: dict[str, Any], number: Any) -> PerModel:
        """One number for all models as a number of each, where the group keeps such."""
        device = largest(group["params"]).device
        return number if isinstance(number, PerModel) else per_model([float(number)] * self.num_models, device)

    def settled(self, key: str, value: Any, device: torch.device | str = "cpu") -> Any:
        """An option as a group keeps it: a float, a `PerModel`, a pair of them, or what is no number as it stands."""
        if key == "betas":
            pair = _pair(value, self.num_models)
            return tuple(self._number(f"betas[{place}]", key, beta, device) for place, beta in enumerate(pair))
        if key in self.bounds:
            return self._number(key, key, value, device)
        if key in FLAGS and not isinstance(value, bool):
            raise InputError(f"{key}: expected True or False, the same for all models of a group, got {value!r}")
        return value

    def _number(self, name: str, key: str, value: Any, device: torch.device | str) -> Any:
        if isinstance(value, PerModel) and value.device == torch.device(device):
            return value
        found = numbers_of(name, value, self.num_models, self.bounds[key])
        return per_model(found, device) if isinstance(found, list) else found

    def settle(self, group: dict[str, Any]) -> None:
        """Read what people wrote into a group between two steps, such as ``group["lr"] = [...]``."""
        for key, bound in self.bounds.items():
            for part in as_tuple(group[key]) if key == "betas" else (group[key],):
                if type(part) is not PerModel and not (isinstance(part, (float, int)) and bound.holds(part)):
                    group[key] = self.settled(key, group[key], largest(group["params"]).device)
                    break

    @property
    def frozen(self) -> tuple[bool, ...]:
        """For each model, True if it is frozen."""
        return tuple(self._frozen)

    def freeze(self, model: int) -> None:
        """Leave this model as it is, parameters and state, in all steps to come."""
        self._frozen[self.checked_model(model)] = True
        self._hocket_version += 1
        self.count_per_model()

    def unfreeze(self, model: int) -> None:
        """Let this model take part in the steps again."""
        self._frozen[self.checked_model(model)] = False
        self._hocket_version += 1

    def count_per_model(self) -> None:
        """From now on count the steps of each model on its own."""
        self._per_model_steps = True
        steps = ((p, own["step"]) for p, own in self.state.items() if "step" in own)
        if any(not step.dim() and self._slots[p] is None for p, step in steps):
            self.share_all_counts()

    def count(self, group: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
        """Count a step in these states, of which some may share their count."""
        for step in {id(state["step"]): state["step"] for state in states if "step" in state}.values():
            step += 1

    def first_count(self, key: str, p: torch.Tensor) -> torch.Tensor:
        """A counter before the first step: a step count is one on the CPU, as in torch, or B beside the parameter."""
        first = self.counters[key]
        if key != "step":
            return torch.full((self.num_models,), first, dtype=count_dtype(), device=p.device)
        if self._per_model_steps and self._slots[p] is None:
            return torch.full((self.num_models,), first, dtype=torch.float64, device=p.device)
        return torch.full((), first, dtype=count_dtype())

    def share_all_counts(self) -> None:
        """Let parameters that are in step share a count, after the state was set. Models that differ have their own."""
        if any(self._frozen) or any(own["step"].dim() for own in self.state.values() if "step" in own):
            self._per_model_steps = True
        for group in self.param_groups:
            self.share_counts(group)

    def share_counts(
        self,
        group: dict[str, Any],
        resting: Collection[torch.Tensor] = (),
        absent: Mapping[torch.Tensor, list[int]] = MappingProxyType({}),
    ) -> None:
        """Let equal counts of a group share one tensor, apart from parameters at rest, in all models or in the `absent`
        ones. Others have their own.
        """
        known: dict[Any, torch.Tensor] = {}
        for p in group["params"]:
            entries, is_fused = self.state.get(p, {}), self._slots[p] is None
            for key in self.counters.keys() & entries.keys():
                count = torch.as_tensor(entries[key])
                if key == "step" and not count.dim() and self._per_model_steps and is_fused:
                    count = self.first_count(key, p) + count.item()
                count = count.to("cpu" if key == "step" and not count.dim() else p.device)
                rests = (p in resting, *absent.get(p, ()))
                same = (key, rests, count.device, count.dtype, count.dim(), *count.reshape(-1).tolist())
                if (p in resting or absent.get(p)) and same not in known:  # it may share one with others so far
                    count = count.clone()
                entries[key] = known.setdefault(same, count)


def signature_of(torch_class: type) -> inspect.Signature:
    """The arguments of a fused optimizer: torch's, without those of its kernels, and its own."""
    own = [
        parameter for parameter in inspect.signature(torch_class).parameters.values() if parameter.name not in KERNELS
    ]
    for name, default in (("num_models", None), ("nonfinite", "step")):
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return inspect.Signature(own)


def options_of(kind: type[Counted], arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer by the names, places and defaults of torch's, without those of its kernels."""
    for name in KERNELS:
        if named.pop(name, None):
            raise InputError(f"{name}: {kind.__name__} of fused models has no such option, got True")
    bound = inspect.signature(kind).bind(None, *arguments, **named)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name in FLAGS or name in kind.bounds}


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Parameter groups with their parameters in lists. A name beside a parameter stays there."""
    if isinstance(params, torch.Tensor):
        raise InputError(f"params: expected parameters in a list, or groups of them, got one of shape {params.shape}")
    found = list(params)
    if not found:
        raise InputError("params: expected at least one parameter, got an empty list")
    groups = found if isinstance(found[0], dict) else [{"params": found}]
    checked = []
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise InputError(f"params: expected group {number} to be a dict with 'params', got {group!r}")
        inside = group["params"]
        checked.append({**group, "params": [inside] if isinstance(inside, torch.Tensor) else list(inside)})
    return checked


def _pair(value: Any, num_models: int) -> tuple[Any, Any]:
    """``betas``: ``(beta1, beta2)``, each one number or B in a list, or a list of B tuples of two numbers."""
    if isinstance(value, list) and value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        if len(value) != num_models:
            raise InputError(f"betas: expected {num_models} pairs, one for each model, got {len(value)}: {value!r}")
        return [first for first, _ in value], [second for _, second in value]
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InputError(f"betas: expected a pair, each one number or {num_models} in a list, got {value!r}")
    return value[0], value[1]


def count_dtype() -> torch.dtype:
    """The dtype of the step counts of torch's optimizers."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def step_of(state: dict[str, Any]) -> Number:
    """The number of steps that a parameter has seen, one or B; 0 if not counted."""
    count = state.get("step")
    return 0.0 if count is None else count if count.dim() else count.item()
