"""Adamax (Kingma and Ba, ICLR 2015, section 7.1) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.adam import Adam
from hocket.fusion.optim.arithmetic import addcdiv_, divided, lerp_, power
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Number

__all__ = ["Adamax"]


class Adamax(FusedOptimizer):
    """`torch.optim.Adamax` of B models: lr, betas, eps and weight_decay may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> Adamax([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.75]
    """

    torch_class = torch.optim.Adamax
    bounds = Adam.bounds

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        beta1, beta2 = group["betas"]
        return {
            "decay": group["weight_decay"],
            "first": 1 - beta1,
            "keep": beta2,
            "eps": group["eps"],
            "size": -divided(group["lr"], 1 - power(beta1, step)),
        }

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        first, largest = chunk.state("exp_avg"), chunk.state("exp_inf")
        lerp_(first, chunk.grads, by["first"])
        torch._foreach_mul_(largest, by["keep"])
        sizes = list(torch._foreach_abs(chunk.grads))
        torch._foreach_add_(sizes, by["eps"])
        torch._foreach_maximum_(largest, sizes)
        addcdiv_(chunk.params, first, largest, by["size"], chunk.memory)
