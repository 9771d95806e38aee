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
    """`torch.optim.Adadelta` of B models: the same update, with numbers that may differ between models.

    Args:
        params: parameters of a fused model, or groups of them.
        lr, rho, eps, weight_decay: one number, or B in a list.
        maximize: the same for all models.
        num_models, nonfinite: see `FusedOptimizer`.

    Raises:
        InputError: a number out of bounds (`rho` lies in [0, 1], the others are >= 0), or a list of the wrong length.

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

    def __init__(
        self,
        params: Any,
        lr: Any = 1.0,
        rho: Any = 0.9,
        eps: Any = 1e-6,
        weight_decay: Any = 0,
        *,
        maximize: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, num_models=num_models, nonfinite=nonfinite)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        for key in self.entries(group):
            if key not in state:
                state[key] = torch.zeros_like(p)

    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
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
        addcmul_(squares, chunk.grads, chunk.grads, by["take"])
        below = list(torch._foreach_add(squares, by["eps"]))
        torch._foreach_sqrt_(below)
        steps = list(torch._foreach_add(deltas, by["eps"]))
        torch._foreach_sqrt_(steps)
        torch._foreach_div_(steps, below)
        torch._foreach_mul_(steps, chunk.grads)
        torch._foreach_mul_(deltas, by["keep"])
        addcmul_(deltas, steps, steps, by["take"])
        add_(chunk.params, steps, by["size"])
