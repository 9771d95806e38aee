"""RAdam (Liu et al., ICLR 2020) of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.fusion.optim.adam import Adam
from hocket.fusion.optim.arithmetic import addcdiv_, divided, power, root, sqrt
from hocket.fusion.optim.base import Chunk
from hocket.fusion.optim.hyper import Number

__all__ = ["RAdam"]

LEAST_LENGTH = 5.0  # of the moving average, from which its variance is rectified


class RAdam(Adam):
    """`torch.optim.RAdam` of B models: lr, betas, eps and weight_decay may differ between models.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> RAdam([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.5, 0.75]
    """

    torch_class = torch.optim.RAdam

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        numbers = self.moments(group, step)
        beta2 = group["betas"][1]
        powered = power(beta2, step)
        limit = divided(2, 1 - beta2) - 1
        length = limit - divided(2 * step * powered, 1 - powered)
        plain_size = -divided(group["lr"], numbers.pop("bias"))
        square = divided((length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length)
        if isinstance(length, torch.Tensor):
            rectified: Number = (length > LEAST_LENGTH).double()
            factor: Number = torch.where(length > LEAST_LENGTH, square.abs().sqrt() * numbers["root"], 1.0)  # type: ignore[union-attr]
        else:
            rectified = 1.0 if length > LEAST_LENGTH else 0.0
            factor = root(square) * numbers["root"] if length > LEAST_LENGTH else 1.0
        return {**numbers, "rectified": rectified, "size": plain_size * factor}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk, first, second = self.averaged(chunk, group, by)
        rectified = by["rectified"]
        below = sqrt(second, chunk.memory)
        torch._foreach_add_(below, by["eps"])
        if isinstance(rectified, list):
            below = [torch.where(each > 0, own, 1.0) for each, own in zip(rectified, below, strict=True)]
        elif not rectified:
            torch._foreach_zero_(below)
            torch._foreach_add_(below, 1.0)
        addcdiv_(chunk.params, first, below, by["size"], chunk.memory)

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        return None
