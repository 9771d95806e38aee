"""Gradient descent with momentum, and optimizers that scale a gradient by sums or averages of its squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.errors import InputError
from hocket.optim.arithmetic import add, add_, addcdiv_, addcmul_, divided, is_on, lerp_, root_and
from hocket.optim.base import FusedOptimizer
from hocket.optim.chunks import Chunk
from hocket.optim.hyper import Bound, Number, numbers


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
    bounds = {**numbers("lr", "momentum", "dampening", "weight_decay"), "dampening": Bound(float("-inf"))}  # noqa: RUF012

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
        return {"size": -group["lr"], "momentum": momentum, "share": share}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
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


class Adagrad(FusedOptimizer):
    """`torch.optim.Adagrad` (Duchi, Hazan and Singer, JMLR 2011) of B models: its numbers may differ between models."""

    torch_class = torch.optim.Adagrad
    bounds = numbers("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

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
        return {"size": -divided(group["lr"], slowed)}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        sums = chunk.state("sum")
        torch._foreach_addcmul_(sums, chunk.grads, chunk.grads, value=1)
        addcdiv_(chunk.params, chunk.grads, root_and(sums, by["eps"]), by["size"])


def _averaging(group: dict[str, Any], keep: Number) -> dict[str, Number]:
    """The coefficients of an average of squares that keeps this share of what it was."""
    return {"size": -group["lr"], "keep": keep, "take": 1 - keep}


class RMSprop(FusedOptimizer):
    """`torch.optim.RMSprop` (Hinton's lecture 6e, centered by Graves, arXiv 1308.0850) of B models."""

    torch_class = torch.optim.RMSprop
    bounds = numbers("lr", "alpha", "eps", "weight_decay", "momentum")

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if is_on(group["momentum"]) else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        return {**_averaging(group, group["alpha"]), "momentum": group["momentum"]}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        squares = chunk.state("square_avg")
        torch._foreach_mul_(squares, by["keep"])
        addcmul_(squares, chunk.grads, chunk.grads, by["take"])
        if group["centered"]:
            means = chunk.state("grad_avg")
            lerp_(means, chunk.grads, by["take"])
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
        below = root_and(squares, by["eps"])
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
    """`torch.optim.Adadelta` (Zeiler, arXiv 1212.5701) of B models: its numbers may differ between models."""

    torch_class = torch.optim.Adadelta
    bounds = {**numbers("lr", "rho", "eps", "weight_decay"), "rho": Bound(0, 1, closed=True)}  # noqa: RUF012

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        return _averaging(group, group["rho"])

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
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
