"""Adam (Kingma and Ba, ICLR 2015) and what stands on its moving averages: AdamW, Adamax, NAdam, RAdam, AMSGrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hocket.optim.arithmetic import Tensors, add_, addcdiv_, addcmul_, divided, lerp_, power, root, root_and
from hocket.optim.base import FusedOptimizer
from hocket.optim.chunks import Chunk
from hocket.optim.counts import step_of
from hocket.optim.hyper import Bound, Number, numbers


class MovingAverages(FusedOptimizer):
    """Moving averages of gradients and of their squares: what Adam and its kin have in common."""

    bounds: ClassVar[Mapping[str, Bound]] = {**numbers("lr", "betas", "eps", "weight_decay"), "betas": Bound(0, 1)}

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        """Coefficients of both averages, the correction of the second's bias, and the size of a step."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        return {
            "first": 1 - beta1,
            "keep": beta2,
            "second": 1 - beta2,
            "root": root(1 - power(beta2, step)),
            "size": -divided(lr, 1 - power(beta1, step)),
        }

    def averaged(self, chunk: Chunk, by: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
        """Both moving averages, updated."""
        first, second = chunk.state("exp_avg"), chunk.state("exp_avg_sq")
        lerp_(first, chunk.grads, by["first"])
        torch._foreach_mul_(second, by["keep"])
        addcmul_(second, chunk.grads, chunk.grads, by["second"])
        return first, second

    def spread(self, second: Tensors, by: Mapping[str, Any]) -> Tensors:
        """The root of the second average, its bias corrected, that a direction is divided by."""
        below = list(torch._foreach_sqrt(second))
        torch._foreach_div_(below, by["root"])
        torch._foreach_add_(below, by["eps"])
        return below


class Adam(MovingAverages):
    """`torch.optim.Adam` of B models: lr, betas, eps and weight_decay may differ between models.

    With `amsgrad` it is AMSGrad (Reddi et al., ICLR 2018).

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = Adam([weights], lr=[0.5, 0.25], betas=(0.9, [0.99, 0.999]), num_models=2)
        >>> optimizer.step()
        >>> [round(weight, 4) for weight in weights[:, 0].tolist()]
        [0.5, 0.75]
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        first, second = self.averaged(chunk, by)
        if group["amsgrad"]:
            largest = chunk.state("max_exp_avg_sq")
            torch._foreach_maximum_(largest, second)
            second = largest
        addcdiv_(chunk.params, first, self.spread(second, by), by["size"])

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        if any(isinstance(number, torch.Tensor) for number in (*group["betas"], group["eps"])):
            return None
        lr, decay = group["lr"], group["weight_decay"]
        if not isinstance(lr, torch.Tensor) and not isinstance(decay, torch.Tensor):
            return {"lr": lr, "decay": decay}
        # In double precision a direction and a rate, each rounded, show in the twelfth digit.
        return {"lr": lr, "decay": self.decay(group)} if dtype == torch.float32 else None

    def update_by_kernel(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        """With rates that differ, by a kernel that steps at a rate of 1 from 0: a step's direction, times the rates."""
        rate, decay, params, decoupled = by["lr"], by["decay"], chunk.params, group["decoupled_weight_decay"]
        if isinstance(rate, list) or isinstance(decay, list):
            chunk, decay = self.decayed(chunk, group, decay), 0.0
        if isinstance(rate, list):
            params = list(map(torch.zeros_like, params))
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
    """`torch.optim.AdamW` (Loshchilov and Hutter, ICLR 2019) of B models: weight decay shrinks the parameters."""

    torch_class = torch.optim.AdamW
    fixed = {"decoupled_weight_decay": True}  # noqa: RUF012


class Adamax(MovingAverages):
    """`torch.optim.Adamax` (Kingma and Ba, section 7.1) of B models: lr, betas, eps and weight_decay may differ."""

    torch_class = torch.optim.Adamax

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        first, largest = chunk.state("exp_avg"), chunk.state("exp_inf")
        lerp_(first, chunk.grads, by["first"])
        torch._foreach_mul_(largest, by["keep"])
        sizes = list(torch._foreach_abs(chunk.grads))
        torch._foreach_add_(sizes, by["eps"])
        torch._foreach_maximum_(largest, sizes)
        addcdiv_(chunk.params, first, largest, by["size"])


class NAdam(MovingAverages):
    """`torch.optim.NAdam` (Dozat, ICLR workshop 2016) of B models: every number may differ, momentum_decay too."""

    torch_class = torch.optim.NAdam
    bounds = {**MovingAverages.bounds, "momentum_decay": Bound()}  # noqa: RUF012
    counters = {"step": 0.0, "mu_product": 1.0}  # noqa: RUF012

    def count(self, group: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
        super().count(group, states)
        for state in {id(state["mu_product"]): state for state in states}.values():
            momentum, product = self._momentum(group, step_of(state)), state["mu_product"]
            product *= momentum.to(product.dtype) if isinstance(momentum, torch.Tensor) else momentum

    def _momentum(self, group: dict[str, Any], step: Number) -> Number:
        return group["betas"][0] * (1 - 0.5 * power(0.96, step * group["momentum_decay"]))

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        lr, product = group["lr"], state["mu_product"].double()
        now, ahead = self._momentum(group, step), self._momentum(group, step + 1)
        grad, mean = divided(-lr * (1 - now), 1 - product), divided(-lr * ahead, 1 - product * ahead)
        return {**super().coefficients(group, step, state), "grad": grad, "mean": mean}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        first, second = self.averaged(chunk, by)
        below = self.spread(second, by)
        addcdiv_(chunk.params, chunk.grads, below, by["grad"])
        addcdiv_(chunk.params, first, below, by["mean"])


class RAdam(MovingAverages):
    """`torch.optim.RAdam` (Liu et al., ICLR 2020) of B models: lr, betas, eps and weight_decay may differ."""

    torch_class = torch.optim.RAdam
    least_length: ClassVar[float] = 5.0  # of the moving average, from which its variance is rectified

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        numbers = super().coefficients(group, step, state)
        beta2, least = group["betas"][1], self.least_length
        powered = power(beta2, step)
        limit = divided(2, 1 - beta2) - 1
        length = limit - divided(2 * step * powered, 1 - powered)
        square = divided((length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length)
        if isinstance(length, torch.Tensor):
            rectified: Number = (length > least).double()
            factor: Number = torch.where(length > least, square.abs().sqrt() * numbers["root"], 1.0)  # type: ignore[union-attr]
        else:
            rectified = 1.0 if length > least else 0.0
            factor = root(square) * numbers["root"] if length > least else 1.0
        return {**numbers, "rectified": rectified, "size": numbers["size"] * factor}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        first, second = self.averaged(chunk, by)
        rectified = by["rectified"]
        below = root_and(second, by["eps"])
        if isinstance(rectified, list):
            below = [torch.where(each > 0, own, 1.0) for each, own in zip(rectified, below, strict=True)]
        elif not rectified:
            torch._foreach_zero_(below)
            torch._foreach_add_(below, 1.0)
        addcdiv_(chunk.params, first, below, by["size"])
