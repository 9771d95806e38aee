"""RMSprop (Hinton's lecture 6e; centered: Graves, arXiv 1308.0850) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.arithmetic import add_, addcdiv_, addcmul_, is_on, lerp_, sqrt
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["RMSprop"]


class RMSprop(FusedOptimizer):
    """`torch.optim.RMSprop` of B models: its numbers may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> RMSprop([weights], lr=[0.05, 0.01], num_models=2).step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.9]
    """

    torch_class = torch.optim.RMSprop
    bounds = {key: Bound() for key in ("lr", "alpha", "eps", "weight_decay", "momentum")}  # noqa: RUF012

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if is_on(group["momentum"]) else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        return {
            "size": -group["lr"],
            "keep": group["alpha"],
            "take": 1 - group["alpha"],
            "eps": group["eps"],
            "decay": group["weight_decay"],
            "momentum": group["momentum"],
        }

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        squares = chunk.state("square_avg")
        torch._foreach_mul_(squares, by["keep"])
        addcmul_(squares, chunk.grads, chunk.grads, by["take"], chunk.memory)
        if group["centered"]:
            means = chunk.state("grad_avg")
            lerp_(means, chunk.grads, by["take"])
            below = list(torch._foreach_addcmul(squares, means, means, value=-1))
            torch._foreach_sqrt_(below)
        else:
            below = sqrt(squares, chunk.memory)
        torch._foreach_add_(below, by["eps"])
        if is_on(group["momentum"]):
            buffers = chunk.state("momentum_buffer")
            torch._foreach_mul_(buffers, by["momentum"])
            torch._foreach_addcdiv_(buffers, chunk.grads, below)
            add_(chunk.params, buffers, by["size"])
        else:
            addcdiv_(chunk.params, chunk.grads, below, by["size"], chunk.memory)

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        if group["momentum"] == 0:
            state.pop("momentum_buffer", None)
        return state
