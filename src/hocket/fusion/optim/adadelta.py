"""Adadelta (Zeiler, arXiv 1212.5701) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.arithmetic import add_, addcmul_
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["Adadelta"]


class Adadelta(FusedOptimizer):
    """`torch.optim.Adadelta` of B models: its numbers may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> Adadelta([weights], lr=[1, 2], eps=1.0, rho=0.0, num_models=2).step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.2929, -0.4142]
    """

    torch_class = torch.optim.Adadelta
    bounds = {  # noqa: RUF012
        "lr": Bound(),
        "rho": Bound(0, 1, closed=True),
        "eps": Bound(),
        "weight_decay": Bound(),
    }

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        return {
            "size": -group["lr"],
            "keep": group["rho"],
            "take": 1 - group["rho"],
            "eps": group["eps"],
            "decay": group["weight_decay"],
        }

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        squares, deltas = chunk.state("square_avg"), chunk.state("acc_delta")
        torch._foreach_mul_(squares, by["keep"])
        addcmul_(squares, chunk.grads, chunk.grads, by["take"], chunk.memory)
        below = list(torch._foreach_add(squares, by["eps"]))
        torch._foreach_sqrt_(below)
        steps = list(torch._foreach_add(deltas, by["eps"]))
        torch._foreach_sqrt_(steps)
        torch._foreach_div_(steps, below)
        torch._foreach_mul_(steps, chunk.grads)
        torch._foreach_mul_(deltas, by["keep"])
        addcmul_(deltas, steps, steps, by["take"], chunk.memory)
        add_(chunk.params, steps, by["size"])
