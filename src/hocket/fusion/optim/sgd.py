"""Stochastic gradient descent, with momentum, of B models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim.arithmetic import Tensors, add, add_, is_on
from hocket.fusion.optim.base import Chunk, FusedOptimizer
from hocket.fusion.optim.hyper import Bound, Number

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """`torch.optim.SGD` of B models: the same update, with numbers that may differ between models.

    A model's first step sets its momentum buffer to the gradient, without dampening; until then ``state["fresh"]`` says
    that it has yet to.

    Args:
        params: parameters of a fused model, or groups of them.
        lr, momentum, dampening, weight_decay: one number, or B in a list.
        nesterov, maximize: the same for all models.
        num_models, nonfinite: see `FusedOptimizer`.

    Raises:
        InputError: a number below 0, a list of the wrong length, or `nesterov` without momentum or with dampening.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> SGD([weights], lr=[0.5, 0.25], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.5, 0.75]
    """

    torch_class = torch.optim.SGD
    counts = False
    bounds = {  # noqa: RUF012
        "lr": Bound(),
        "momentum": Bound(),
        "dampening": Bound(float("-inf")),
        "weight_decay": Bound(),
    }

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: Any = 0,
        dampening: Any = 0,
        weight_decay: Any = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, num_models=num_models, nonfinite=nonfinite)

    def check_group(self, group: dict[str, Any]) -> None:
        if group["nesterov"]:
            momenta, dampenings = (torch.as_tensor(group[key]) for key in ("momentum", "dampening"))
            if bool((momenta <= 0).any()) or bool((dampenings != 0).any()):
                raise InputError(
                    "nesterov: expected a momentum > 0 and no dampening for every model, "
                    f"got momentum {momenta.tolist()} and dampening {dampenings.tolist()}"
                )

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if is_on(group["momentum"]) else ()

    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if is_on(group["momentum"]) and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
            shape = (self.num_models,) if self._slots[p] is None else ()
            state["fresh"] = torch.ones(shape, dtype=torch.bool, device=p.device)

    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
        momentum, dampening = group["momentum"], group["dampening"]
        share = 1 - dampening
        if isinstance(momentum, torch.Tensor) and is_on(dampening):
            # Without momentum there is nothing that torch would dampen.
            share = torch.where(momentum == 0, 1.0, share)
        return {"size": -group["lr"], "decay": group["weight_decay"], "momentum": momentum, "share": share}

    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        chunk = chunk.decayed(by["decay"])
        steps = chunk.grads
        if is_on(group["momentum"]):
            buffers = chunk.state("momentum_buffer")
            self._gather(chunk, buffers, by)
            steps = add(chunk.grads, buffers, by["momentum"]) if group["nesterov"] else buffers
        add_(chunk.params, steps, by["size"])

    def update_at_once(
        self, params: Tensors, grads: Tensors, states: Sequence[dict[str, Any]], group: dict[str, Any], count: Any
    ) -> bool:
        buffers: list[torch.Tensor] = []
        if group["momentum"]:
            if not {"fresh"}.isdisjoint(chain.from_iterable(states)):
                return False
            buffers = [state["momentum_buffer"] for state in states]
        numbers = {key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")}
        torch._fused_sgd_(params, grads, buffers, **numbers, is_first_step=False)
        return True

    def _gather(self, chunk: Chunk, buffers: Tensors, by: Mapping[str, Any]) -> None:
        """Bring the buffers up to date."""
        share = by["share"]
        fresh = [state.get("fresh") for state in chunk.states]
        if any(mask is not None for mask in fresh):
            shares = share if isinstance(share, list) else [share] * len(buffers)
            share = [_share(*each) for each in zip(fresh, shares, buffers, strict=True)]
        torch._foreach_mul_(buffers, by["momentum"])
        add_(buffers, chunk.grads, share)

    def finish(self, states: Sequence[dict[str, Any]], slots: Sequence[int | None], skipped: Sequence[int]) -> None:
        for state, slot in zip(states, slots or [None] * len(states), strict=True):
            if "fresh" not in state:
                continue
            if skipped and slot is None:
                still = torch.zeros_like(state["fresh"])
                still[list(skipped)] = state["fresh"][list(skipped)]
                state["fresh"] = still
                self.tidy_state(state)
            else:
                del state["fresh"]

    def tidy_state(self, state: dict[str, Any]) -> None:
        if "fresh" in state and not bool(state["fresh"].any()):
            del state["fresh"]

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        fresh = bool(state.pop("fresh", False))
        return {} if fresh or group["momentum"] == 0 else state


def _share(fresh: torch.Tensor | None, share: Any, buffer: torch.Tensor) -> torch.Tensor:
    """How much of the gradient a buffer takes in: all of it in a model's first step."""
    factor = torch.as_tensor(share, dtype=buffer.dtype, device=buffer.device)
    if fresh is None:
        return factor
    column = fresh.bool().view(-1, *(1,) * (buffer.dim() - 1)) if fresh.dim() else fresh.bool()
    return torch.where(column, factor.new_ones(()), factor)
