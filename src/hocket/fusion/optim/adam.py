"""Adam (Kingma and Ba, ICLR 2015), AMSGrad (Reddi et al., ICLR 2018), AdamW (Loshchilov and Hutter, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hocket.fusion.optim.arithmetic import Tensors, add_, addcdiv_, addcmul_, divided, is_on, lerp_, power, root, sqrt
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["Adam", "AdamW"]


class Adam(FusedOptimizer):
    """`torch.optim.Adam` of B models: lr, betas, eps and weight_decay may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = Adam([weights], lr=[0.5, 0.25], betas=(0.9, [0.99, 0.999]), num_models=2)
        >>> optimizer.step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.75]
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    bounds: ClassVar[Mapping[str, Bound]] = {
        "lr": Bound(),
        "betas": Bound(0, 1),
        "eps": Bound(),
        "weight_decay": Bound(),
    }

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))

    def moments(self, group: dict[str, Any], step: Number) -> dict[str, Number]:
        """The coefficients of weight decay and of both moving averages, and what corrects their bias."""
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        return {
            "decay": 1 - lr * decay if group["decoupled_weight_decay"] and is_on(decay) else decay,
            "first": 1 - beta1,
            "keep": beta2,
            "second": 1 - beta2,
            "bias": 1 - power(beta1, step),
            "root": root(1 - power(beta2, step)),
            "eps": group["eps"],
        }

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        numbers = self.moments(group, step)
        return {**numbers, "size": -divided(group["lr"], numbers.pop("bias"))}

    def averaged(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> tuple[Chunk, Tensors, Tensors]:
        """Decay weights and update the moving averages; the chunk with its gradients, and both averages."""
        if not group["decoupled_weight_decay"]:
            chunk = chunk.decayed(by["decay"])
        elif is_on(group["weight_decay"]):
            torch._foreach_mul_(chunk.params, by["decay"])
        first, second = chunk.state("exp_avg"), chunk.state("exp_avg_sq")
        lerp_(first, chunk.grads, by["first"])
        torch._foreach_mul_(second, by["keep"])
        addcmul_(second, chunk.grads, chunk.grads, by["second"], chunk.memory)
        return chunk, first, second

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk, first, second = self.averaged(chunk, group, by)
        if group["amsgrad"]:
            largest = chunk.state("max_exp_avg_sq")
            torch._foreach_maximum_(largest, second)
            second = largest
        below = sqrt(second, chunk.memory)
        torch._foreach_div_(below, by["root"])
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, first, below, by["size"], chunk.memory)

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        if any(isinstance(number, torch.Tensor) for number in (*group["betas"], group["eps"])):
            return None
        lr, decay = group["lr"], group["weight_decay"]
        if isinstance(lr, torch.Tensor) or isinstance(decay, torch.Tensor):
            if dtype != torch.float32:  # where a direction and a rate, each rounded, show in the twelfth digit
                return None
            decay = 1 - lr * decay if group["decoupled_weight_decay"] and is_on(decay) else decay
        return {"lr": lr, "decay": decay}

    def update_by_kernel(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        """With rates that differ, by a kernel that steps at a rate of 1 from 0: a step's direction, times the rates."""
        rate, decay, params, decoupled = by["lr"], by["decay"], chunk.params, group["decoupled_weight_decay"]
        if isinstance(rate, list) or isinstance(decay, list):
            if decoupled and is_on(group["weight_decay"]):
                torch._foreach_mul_(params, decay)
            elif not decoupled:
                chunk = chunk.decayed(decay)
            decay = 0.0
        if isinstance(rate, list):
            params = chunk.memory(params) or [torch.empty_like(p) for p in params]
            torch._foreach_zero_(params)
        (beta1, beta2), amsgrad = group["betas"], group["amsgrad"]
        kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            params,
            chunk.grads,
            chunk.state("exp_avg"),
            chunk.state("exp_avg_sq"),
            chunk.state("max_exp_avg_sq") if amsgrad else [],
            [chunk.count] * len(params),
            lr=1.0 if isinstance(rate, list) else rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=group["eps"],
            amsgrad=amsgrad,
            maximize=False,
        )
        if isinstance(rate, list):
            add_(chunk.params, params, rate)


class AdamW(Adam):
    """`torch.optim.AdamW` of B models: Adam whose weight decay shrinks the parameters and not the gradients.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.zeros(2, 3)
        >>> AdamW([weights], lr=0.5, weight_decay=[0.5, 0], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.75, 1.0]
    """

    torch_class = torch.optim.AdamW
    fixed = {"decoupled_weight_decay": True}  # noqa: RUF012
