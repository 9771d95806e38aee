"""Step counts, as torch keeps them: a number on the CPU, shared by the parameters that are in step, or one per model.

all models step together      step 7        one tensor without axes, shared
a model rests on its own      step (7, 6, 7)
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from hocket.fusion.optim.slots import Slots

__all__ = ["are_per_model", "count_dtype", "per_count", "per_model_counts", "rejoin"]

State = MutableMapping[Any, dict[str, Any]]


def count_dtype() -> torch.dtype:
    """What torch's optimizers count in."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def per_count(counts: Sequence[float]) -> torch.Tensor:
    """Step counts of B models."""
    return torch.tensor(list(counts), dtype=torch.float64)


def per_model_counts(state: State, slots: Slots) -> None:
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


def are_per_model(state: State) -> bool:
    """Whether models count their steps on their own."""
    return any(entries["step"].dim() > 0 for entries in state.values() if "step" in entries)
