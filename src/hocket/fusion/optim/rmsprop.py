"""RMSprop (Hinton's lecture 6e; centered: Graves, arXiv 1308.0850) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.arithmetic import add_, addcdiv_, addcmul_, is_on, lerp_
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["RMSprop"]


class RMSprop(FusedOptimizer):
    """`torch.optim.RMSprop` of B models: the same update, with numbers that may differ between models.

    Args:
        params: parameters of a fused model, or groups of them.
        lr, alpha, eps, weight_decay, momentum: one number, or B in a list.
        centered, maximize: the same for all models.
        num_models, nonfinite: see `FusedOptimizer`.

    Raises:
        InputError: a number below 0, or a list of the wrong length.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> RMSprop([weights], lr=[0.05, 0.01], num_models=2).step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.9]
    """

    torch_class = torch.optim.RMSprop
    bounds = {key: Bound() for key in ("lr", "alpha", "eps", "weight_decay", "momentum")}  # noqa: RUF012

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: Any = 0.99,
        eps: Any = 1e-8,
        weight_decay: Any = 0,
        momentum: Any = 0,
        centered: bool = False,
        *,
        maximize: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        super().__init__(params, defaults, num_models=num_models, nonfinite=nonfinite)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if is_on(group["momentum"]) else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        for key in self.entries(group):
            if key not in state:
                state[key] = torch.zeros_like(p)

    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
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
        addcmul_(squares, chunk.grads, chunk.grads, by["take"])
        if group["centered"]:
            means = chunk.state("grad_avg")
            lerp_(means, chunk.grads, by["take"])
            below = list(torch._foreach_addcmul(squares, means, means, value=-1))
            torch._foreach_sqrt_(below)
        else:
            below = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(below, by["eps"])
        if is_on(group["momentum"]):
            buffers = chunk.state("momentum_buffer")
            torch._foreach_mul_(buffers, by["momentum"])
            torch._foreach_addcdiv_(buffers, chunk.grads, below)
            add_(chunk.params, buffers, by["size"])
        else:
            addcdiv_(chunk.params, chunk.grads, below, by["size"])

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        if group["momentum"] == 0:
            state.pop("momentum_buffer", None)
        return state
