"""One model's numbers in one parameter group, as torch's schedulers read and set them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import PerModel, as_list, per_model

__all__ = ["KEYS", "Shadow", "epoch_of", "moved", "put", "read"]

KEYS = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


class Shadow(torch.optim.Optimizer):
    """An optimizer with one parameter group and nothing to train."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__([torch.zeros(0)], {key: 0.0 for key in KEYS[:3] if key in optimizer.defaults})
        self._opt_called = True  # whether steps come in order is asked of the fused optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is trained here."""

    # As torch marks a step that notes its calls.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def moved(cell: LRScheduler, shadow: Shadow) -> LRScheduler:
    """A torch scheduler, with those that it is made of, on another shadow from now on."""
    cell.optimizer = shadow
    for inner in getattr(cell, "_schedulers", ()):
        moved(inner, shadow)
    return cell


def epoch_of(cell: Any) -> int:
    """How many steps a torch scheduler has seen, or the first of those that it is made of."""
    return cell.last_epoch if hasattr(cell, "last_epoch") else epoch_of(cell._schedulers[0])


def read(value: Any, num_models: int) -> list[Any]:
    """A number of a group as that of each model; a pair of betas as pairs."""
    if isinstance(value, tuple):
        return list(zip(*(as_list(part, num_models) for part in value), strict=True))
    return as_list(value, num_models)


def put(optimizer: FusedOptimizer, group: dict[str, Any], key: str, values: list[Any]) -> None:
    """Set B numbers of a group; one number stays one while it may."""
    columns = list(map(list, zip(*values, strict=True))) if key == "betas" else [values]
    olds = group[key] if key == "betas" else (group.get(key),)
    parts = [
        column[0] if column.count(column[0]) == len(column) and not isinstance(old, PerModel) else column
        for column, old in zip(columns, olds, strict=True)
    ]
    if key in optimizer.bounds:
        optimizer.set_number(group, key, tuple(parts) if key == "betas" else parts[0])
    else:
        group[key] = per_model(parts[0]) if isinstance(parts[0], list) else parts[0]
