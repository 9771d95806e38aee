"""Step counts, as torch keeps them: one number on the CPU, shared by the parameters that are in step, or one per model.

all models step together      step 7        one tensor without axes, shared
a model rests on its own      step (7, 6, 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.optim.hyper import Number

if TYPE_CHECKING:
    from hocket.optim.base import FusedOptimizer

__all__ = ["count_dtype", "first_count", "part", "rejoin", "step_of"]


def count_dtype() -> torch.dtype:
    """What torch's optimizers count in."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def first_count(optimizer: FusedOptimizer, key: str, p: torch.Tensor) -> torch.Tensor:
    """A counter before the first step: a step count is one on the CPU, as torch has it, or B beside the parameter."""
    first = optimizer.counters[key]
    if key != "step":
        return torch.full((optimizer.num_models,), first, dtype=count_dtype(), device=p.device)
    if optimizer._per_model_steps and optimizer._slots[p] is None:
        return torch.full((optimizer.num_models,), first, dtype=torch.float64, device=p.device)
    return torch.full((), first, dtype=count_dtype())


def step_of(state: dict[str, Any]) -> Number:
    """How many steps a parameter has seen, where that is counted: one number, or B of them."""
    count = state.get("step")
    return 0.0 if count is None else count if count.dim() else count.item()


def part(optimizer: FusedOptimizer, group: dict[str, Any], params: Sequence[torch.Tensor]) -> None:
    """Give the parameters of a group that do not take part in a step, unlike `params`, counters of their own."""
    if len(params) < len(group["params"]):
        shared = {id(optimizer.state[p].get(key)) for p in params for key in optimizer.counters}
        taking_part = set(params)
        for p in group["params"]:
            entries = optimizer.state.get(p, {}) if p not in taking_part else {}
            for key in optimizer.counters:
                if key in entries and id(entries[key]) in shared:
                    entries[key] = entries[key].clone()


def rejoin(optimizer: FusedOptimizer) -> None:
    """Let parameters of a group that have equal counts share one, and count per model if any model has to."""
    steps = [entries["step"] for entries in optimizer.state.values() if "step" in entries]
    if any(optimizer.frozen) or any(step.dim() for step in steps):
        optimizer._per_model_steps = True
    for group in optimizer.param_groups:
        known: dict[Any, torch.Tensor] = {}
        joined: dict[Any, tuple[Any, torch.Tensor]] = {}  # with the old counter, so that no other tensor gets its id
        for p in group["params"]:
            entries, is_fused = optimizer.state.get(p, {}), optimizer._slots[p] is None
            for key in optimizer.counters.keys() & entries.keys():
                old = entries[key]
                if (id(old), is_fused) not in joined:
                    value = torch.as_tensor(old)
                    if key == "step" and not value.dim() and optimizer._per_model_steps and is_fused:
                        value = first_count(optimizer, key, p) + value.item()
                    value = value.to("cpu" if key == "step" and not value.dim() else p.device)
                    same = (key, value.device, value.dtype, value.dim(), *value.reshape(-1).tolist())
                    joined[id(old), is_fused] = old, known.setdefault(same, value)
                entries[key] = joined[id(old), is_fused][1]
