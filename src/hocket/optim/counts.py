"""Step counts, as torch keeps them: one number on the CPU, shared by the parameters that are in step, or one per model.

all models step together      step 7        one tensor without axes, shared
a model rests on its own      step (7, 6, 7)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from hocket.optim.hyper import Number

if TYPE_CHECKING:
    from hocket.optim.base import FusedOptimizer

__all__ = ["count_dtype", "first_count", "share_counts", "step_of"]


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


def share_counts(optimizer: FusedOptimizer, group: dict[str, Any], resting: Collection[torch.Tensor] = ()) -> None:
    """Let parameters of a group that have equal counts share one; those that rest in a step share none with the others.

    A count is one per model wherever models have to be counted on their own.
    """
    known: dict[Any, torch.Tensor] = {}
    for p in group["params"]:
        entries, is_fused = optimizer.state.get(p, {}), optimizer._slots[p] is None
        for key in optimizer.counters.keys() & entries.keys():
            count = torch.as_tensor(entries[key])
            if key == "step" and not count.dim() and optimizer._per_model_steps and is_fused:
                count = first_count(optimizer, key, p) + count.item()
            count = count.to("cpu" if key == "step" and not count.dim() else p.device)
            same = (key, p in resting, count.device, count.dtype, count.dim(), *count.reshape(-1).tolist())
            if p in resting and same not in known:
                count = count.clone()
            entries[key] = known.setdefault(same, count)
