"""Adagrad (Duchi, Hazan and Singer, JMLR 2011) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.arithmetic import addcdiv_, divided, sqrt
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    """`torch.optim.Adagrad` of B models: its numbers may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> Adagrad([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.5, 0.75]
    """

    torch_class = torch.optim.Adagrad
    bounds = {  # noqa: RUF012
        key: Bound() for key in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    }

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, key: str, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        first = group["initial_accumulator_value"]
        begin = complex(1, 1) if p.is_complex() else 1
        if not isinstance(first, torch.Tensor):
            return torch.full_like(p, first * begin)
        return torch.zeros_like(p) + (self._slots.column(first, p) * begin).to(p.device, p.dtype)

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        slowed = 1 + (step - 1) * group["lr_decay"]
        return {"size": -divided(group["lr"], slowed), "eps": group["eps"], "decay": group["weight_decay"]}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        sums = chunk.state("sum")
        torch._foreach_addcmul_(sums, chunk.grads, chunk.grads, value=1)
        below = sqrt(sums, chunk.memory)
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, chunk.grads, below, by["size"], chunk.memory)
