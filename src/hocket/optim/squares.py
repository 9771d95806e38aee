"""Optimizers that scale a gradient by sums or averages of squares, without Adam's first average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.optim.arithmetic import add_, addcdiv_, addcmul_, divided, is_on, lerp_, sqrt
from hocket.optim.base import Chunk, FusedOptimizer
from hocket.optim.hyper import Bound, Number

__all__ = ["Adadelta", "Adagrad", "RMSprop"]


class Adagrad(FusedOptimizer):
    """`torch.optim.Adagrad` (Duchi, Hazan and Singer, JMLR 2011) of B models: its numbers may differ between models.

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
        below = sqrt(sums)
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, chunk.grads, below, by["size"])


def _averaging(group: dict[str, Any], keep: Number) -> dict[str, Number]:
    """The coefficients of an average of squares that keeps this share of what it was."""
    numbers = {"size": -group["lr"], "eps": group["eps"], "decay": group["weight_decay"]}
    return {**numbers, "keep": keep, "take": 1 - keep}


class RMSprop(FusedOptimizer):
    """`torch.optim.RMSprop` (Hinton's lecture 6e; centered: Graves, arXiv 1308.0850) of B models.

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
        return {**_averaging(group, group["alpha"]), "momentum": group["momentum"]}

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
            below = sqrt(squares)
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


class Adadelta(FusedOptimizer):
    """`torch.optim.Adadelta` (Zeiler, arXiv 1212.5701) of B models: its numbers may differ between models.

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
        return _averaging(group, group["rho"])

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
