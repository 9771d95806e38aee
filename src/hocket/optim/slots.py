"""The model of each parameter: all of them (a fused one), or one (of a block that did not fuse)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.optim.hyper import check_whole


class Slots(dict[torch.Tensor, "int | None"]):
    """For each parameter the model it belongs to, or None where it is fused of all B, in the parameters' order."""

    def __init__(self, num_models: int, slots: Mapping[torch.Tensor, int | None]) -> None:
        super().__init__(slots)
        self.num_models = num_models

    def column(self, row: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """B numbers as a tensor that broadcasts against `p`: all of them, or the one of its model."""
        slot = self[p]
        return row.view(-1, *(1,) * (p.dim() - 1)) if slot is None else row[slot]

    def reduced(self, p: torch.Tensor, values: torch.Tensor, order: float) -> torch.Tensor:
        """The norm of each model's part of `values` (shaped as `p`), as B numbers; 0 for models without a part."""
        slot = self[p]
        dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
        if slot is None:
            return torch.linalg.vector_norm(values.reshape(self.num_models, -1), order, dim=1, dtype=dtype)
        norm = torch.linalg.vector_norm(values, order, dtype=dtype)
        found = norm.new_zeros(self.num_models)
        found[slot] = norm
        return found

    def check_shapes(self, params: Iterable[torch.Tensor]) -> None:
        """Refuse fused parameters that are of another number of models by now."""
        for p in params:
            if self[p] is None and p.shape[0] != self.num_models:
                raise InputError(
                    f"a parameter has shape {tuple(p.shape)}: expected a fused one, ({self.num_models}, ...) for "
                    f"{self.num_models} models; where models were dropped from the array, call the optimizer's drop or "
                    "select_models too, or drop them by hocket.optim.ModelSlots"
                )

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that have a gradient, each with it."""
        return [(p, p.grad) for p in self if p.grad is not None]

    def not_finite(self) -> list[int]:
        """The models in whose gradients something is not finite."""
        # Sums may cancel in the complex plane.
        found = [(p, grad) for p, grad in self.gradients() if grad.numel()]
        grads = [(p, torch.view_as_real(grad) if grad.is_complex() else grad) for p, grad in found]
        # A sum over everything is cheap, and finite only if all of it is; which model it was is asked when it is not.
        sums = [(grad.float() if grad.itemsize < 4 else grad).sum().to(torch.float32) for _, grad in grads]
        if not sums or bool(torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all()):
            return []
        norms = [self.reduced(p, grad, math.inf).to(sums[0].device) for p, grad in grads]
        return (~torch.isfinite(torch.stack(norms))).any(0).nonzero().flatten().tolist()


def slots_of(params: Iterable[Any], num_models: int | None = None, known: Slots | None = None) -> Slots:
    """Read from each parameter (or name and parameter) whose it is, beside those that are `known` already.

    Fused ones, of shape (B, ...), carry `_hocket_models` = B. Those of one model `_hocket_model` = i. With
    `num_models`, parameters that carry neither attribute must begin with B.
    """
    found = [p[1] if isinstance(p, tuple) else p for p in params]
    for place, p in enumerate(found):
        if not isinstance(p, torch.Tensor):
            raise InputError(f"parameter {place}: expected a tensor, got {type(p).__name__}")
    total = _total(found, num_models)
    slots: dict[torch.Tensor, int | None] = {} if known is None else dict(known)
    for place, p in enumerate(found):
        model = getattr(p, "_hocket_model", None)
        if model is not None:
            if not 0 <= model < total:
                raise InputError(f"parameter {place} belongs to model {model}: expected one of 0 ... {total - 1}")
        elif p.dim() == 0 or p.shape[0] != total:
            raise InputError(
                f"parameter {place} has shape {tuple(p.shape)}: expected a fused one, ({total}, ...) for {total} models"
            )
        slots[p] = model
    return Slots(total, slots)


def _total(params: Sequence[torch.Tensor], num_models: int | None) -> int:
    marked = {total for p in params if (total := getattr(p, "_hocket_models", None)) is not None}
    listed = " and ".join(map(str, sorted(marked)))
    if num_models is not None:
        num_models = check_whole("num_models", num_models, 1)
        if marked - {num_models}:
            raise InputError(f"params: expected parameters of {num_models} models, got some of {listed}")
        return num_models
    if not marked:
        raise InputError(
            "params: none of them is a fused parameter; pass the parameters of hocket.fuse([...]), or say num_models="
        )
    if len(marked) > 1:
        raise InputError(f"params: expected all of one array, got parameters of {listed} models")
    [total] = marked
    if total < 1:
        raise InputError(f"params: expected an array of at least 1 model, got {total}")
    return int(total)


def largest(params: Sequence[Any]) -> torch.Tensor:
    """The parameter of a group next to which the group's numbers are kept."""
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    return max(tensors, key=lambda p: p.numel()) if tensors else torch.zeros(())
