"""NAdam (Dozat, ICLR workshop 2016) of B models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket.fusion.optim.adam import Adam
from hocket.fusion.optim.arithmetic import addcdiv_, divided, power, sqrt
from hocket.fusion.optim.base import Chunk
from hocket.fusion.optim.counts import count_dtype, step_of
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["NAdam"]


class NAdam(Adam):
    """`torch.optim.NAdam` of B models: lr, betas, eps, weight_decay and momentum_decay may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> NAdam([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> [round(weight, 2) for weight in weights[:, 0].tolist()]
        [0.47, 0.74]
    """

    torch_class = torch.optim.NAdam
    bounds = {**Adam.bounds, "momentum_decay": Bound()}  # noqa: RUF012
    counters = ("step", "mu_product")

    def initial(self, key: str, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if key != "mu_product":
            return super().initial(key, p, group)
        return torch.ones(self.num_models, dtype=count_dtype(), device=p.device)

    def count(self, group: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
        super().count(group, states)
        for state in {id(state["mu_product"]): state for state in states}.values():
            momentum, product = self._momentum(group, step_of(state)), state["mu_product"]
            product *= momentum.to(product.dtype) if isinstance(momentum, torch.Tensor) else momentum

    def _momentum(self, group: dict[str, Any], step: Number) -> Number:
        return group["betas"][0] * (1 - 0.5 * power(0.96, step * group["momentum_decay"]))

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        numbers = self.moments(group, step)
        del numbers["bias"]
        lr, product = group["lr"], state["mu_product"].double()
        now, ahead = self._momentum(group, step), self._momentum(group, step + 1)
        grad, mean = divided(-lr * (1 - now), 1 - product), divided(-lr * ahead, 1 - product * ahead)
        return {**numbers, "grad": grad, "mean": mean}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk, first, second = self.averaged(chunk, group, by)
        below = sqrt(second, chunk.memory)
        torch._foreach_div_(below, by["root"])
        torch._foreach_add_(below, by["eps"])
        addcdiv_(chunk.params, chunk.grads, below, by["grad"], chunk.memory)
        addcdiv_(chunk.params, first, below, by["mean"], chunk.memory)

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        return None
