"""Adam (Kingma and Ba, ICLR 2015) and AMSGrad (Reddi et al., ICLR 2018) of B models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hocket.fusion.optim.arithmetic import Tensors, addcdiv_, addcmul_, counted, divided, is_on, lerp_, power
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["Adam"]


class Adam(FusedOptimizer):
    """`torch.optim.Adam` of B models: the same update, with numbers that may differ between models.

    Args:
        params: parameters of a fused model, or groups of them.
        lr, eps, weight_decay: one number, or B in a list.
        betas: a pair, each one number or B in a list; or a list of B tuples of two.
        amsgrad, maximize: the same for all models.
        decoupled_weight_decay: decay as AdamW does.
        num_models, nonfinite: see `FusedOptimizer`.

    Raises:
        InputError: a number out of bounds (betas lie in [0, 1), the others are >= 0), or a list of the wrong length.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = Adam([weights], lr=[0.5, 0.25], betas=(0.9, [0.99, 0.999]), num_models=2)
        >>> optimizer.step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.75]
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    bounds = {"lr": Bound(), "betas": Bound(0, 1), "eps": Bound(), "weight_decay": Bound()}  # noqa: RUF012

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, num_models=num_models, nonfinite=nonfinite)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        for key in self.entries(group):
            if key not in state:
                state[key] = torch.zeros_like(p)

    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
        assert step is not None
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        bias1 = 1 - power(beta1, step)
        if isinstance(beta2, torch.Tensor):
            root: Number = (1 - power(beta2, step)).sqrt()  # type: ignore[union-attr]
        else:
            root = counted(lambda count: (1 - beta2**count) ** 0.5, step)
        numbers = {
            "first": 1 - beta1,
            "keep": beta2,
            "second": 1 - beta2,
            "root": root,
            "size": -divided(lr, bias1),
            "eps": group["eps"],
            "decay": decay,
        }
        if group["decoupled_weight_decay"] and is_on(decay):
            numbers["decay"] = 1 - lr * decay
        return numbers

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        if not group["decoupled_weight_decay"]:
            chunk = chunk.decayed(by["decay"])
        elif is_on(group["weight_decay"]):
            torch._foreach_mul_(chunk.params, by["decay"])
        first, second = chunk.state("exp_avg"), chunk.state("exp_avg_sq")
        lerp_(first, chunk.grads, by["first"])
        torch._foreach_mul_(second, by["keep"])
        addcmul_(second, chunk.grads, chunk.grads, by["second"])
        if group["amsgrad"]:
            largest = chunk.state("max_exp_avg_sq")
            torch._foreach_maximum_(largest, second)
            second = largest
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, by["root"])
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, first, list(below), by["size"])

    def update_at_once(
        self, params: Tensors, grads: Tensors, states: Sequence[dict[str, Any]], group: dict[str, Any], count: Any
    ) -> bool:
        first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
        beta1, beta2 = group["betas"]
        numbers = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(params, grads, first, second, largest, [count] * len(params), beta1=beta1, beta2=beta2, **numbers)
        return True
