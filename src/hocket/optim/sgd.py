"""Stochastic gradient descent, with momentum, of B models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.errors import InputError
from hocket.optim.arithmetic import add, add_, is_on
from hocket.optim.base import Chunk, FusedOptimizer
from hocket.optim.hyper import Bound, Number

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """`torch.optim.SGD` of B models: lr, momentum, dampening and weight_decay may differ between models.

    A model's first step sets its momentum buffer to the gradient, without dampening: with momentum, steps are counted.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> SGD([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.5, 0.75]
    """

    torch_class = torch.optim.SGD
    bounds = {  # noqa: RUF012
        "lr": Bound(),
        "momentum": Bound(),
        "dampening": Bound(float("-inf")),
        "weight_decay": Bound(),
    }

    def check_group(self, group: dict[str, Any]) -> None:
        if group["nesterov"]:
            momenta, dampenings = (torch.as_tensor(group[key]).cpu() for key in ("momentum", "dampening"))
            if bool((momenta <= 0).any()) or bool((dampenings != 0).any()):
                raise InputError(
                    "nesterov: expected a momentum > 0 and no dampening for every model, "
                    f"got momentum {momenta.tolist()} and dampening {dampenings.tolist()}"
                )

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if is_on(group["momentum"]) else ()

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        momentum, dampening = group["momentum"], group["dampening"]
        share: Number = 1.0
        if is_on(dampening):
            # Neither in the first step nor without momentum is there anything that torch would dampen.
            undamped = torch.as_tensor(momentum == 0) | torch.as_tensor(step == 1)
            if isinstance(momentum, torch.Tensor) or isinstance(step, torch.Tensor):
                share = torch.where(undamped, 1.0, torch.as_tensor(1 - dampening, dtype=torch.float64))
            else:
                share = 1.0 if step == 1 else 1 - dampening
        return {"size": -group["lr"], "decay": group["weight_decay"], "momentum": momentum, "share": share}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        steps = chunk.grads
        if is_on(group["momentum"]):
            buffers = chunk.state("momentum_buffer")
            torch._foreach_mul_(buffers, by["momentum"])
            add_(buffers, chunk.grads, by["share"])
            steps = add(chunk.grads, buffers, by["momentum"]) if group["nesterov"] else buffers
        add_(chunk.params, steps, by["size"])

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        numbers = {key: group[key] for key in ("lr", "momentum", "weight_decay", "dampening")}
        if any(isinstance(number, torch.Tensor) for number in numbers.values()) or group["dampening"] != 0:
            return None
        return numbers

    def update_by_kernel(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        buffers = chunk.state("momentum_buffer") if group["momentum"] else []
        # A buffer begins as zeros: in the first step it becomes the gradient.
        flags = {"nesterov": group["nesterov"], "maximize": False, "is_first_step": False}
        torch._fused_sgd_(chunk.params, chunk.grads, buffers, **by, **flags)

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        count = state.pop("step", 1.0)
        return {} if count == 0 or group["momentum"] == 0 else state
