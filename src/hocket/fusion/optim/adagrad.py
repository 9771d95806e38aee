"""Adagrad (Duchi, Hazan and Singer, JMLR 2011) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.arithmetic import addcdiv_, divided
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    """`torch.optim.Adagrad` of B models: the same update, with numbers that may differ between models.

    Args:
        params: parameters of a fused model, or groups of them.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: one number, or B in a list.
        maximize: the same for all models.
        num_models, nonfinite: see `FusedOptimizer`.

    Raises:
        InputError: a number below 0, or a list of the wrong length.

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

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        lr_decay: Any = 0,
        weight_decay: Any = 0,
        initial_accumulator_value: Any = 0,
        eps: Any = 1e-10,
        *,
        maximize: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, num_models=num_models, nonfinite=nonfinite)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "sum" in state:
            return
        first = group["initial_accumulator_value"]
        begin = complex(1, 1) if p.is_complex() else 1
        if not isinstance(first, torch.Tensor):
            state["sum"] = torch.full_like(p, first * begin)
        else:
            slot = self._slots[p]
            column = first.view(-1, *(1,) * (p.dim() - 1)) if slot is None else first[slot]
            state["sum"] = torch.zeros_like(p) + (column * begin).to(p.device, p.dtype)

    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
        assert step is not None
        lr, slowing = group["lr"], group["lr_decay"]
        if isinstance(slowing, torch.Tensor) and isinstance(step, torch.Tensor):
            step = step.to(slowing.device)
        return {"size": -divided(lr, 1 + (step - 1) * slowing), "eps": group["eps"], "decay": group["weight_decay"]}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        sums = chunk.state("sum")
        torch._foreach_addcmul_(sums, chunk.grads, chunk.grads, value=1)
        below = list(torch._foreach_sqrt(sums))
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, chunk.grads, below, by["size"])
