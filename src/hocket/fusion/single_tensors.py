"""The tensors of a model that is alone, without the models' axis: made once, used in every step.

    whole (1, *shape) --boundary--> own (*shape)        forward: nothing, `own` is kept from step to step
    whole.grad       <--boundary-- own's gradient       backward: one node for all parameters, and no copy

A view of each parameter in each step (``whole.squeeze(0)``) costs two nodes for each, forth and back: on a small model
as much as its ops. `own` shares memory and version count with its whole, so an update shows in it, and an update
between forward and backward is an error as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from hocket.fusion.rules.base import is_watched

__all__ = ["SingleTensors"]

REQUIRES_GRAD = attrgetter("requires_grad")


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([_own(whole) for whole in wholes])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple([None if grad is None else grad[None] for grad in grads])


class SingleTensors:
    """Gives the only model's tensors by name.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(1, 3))
        >>> own = SingleTensors().tensors({"weight": whole})["weight"]
        >>> (2 * own).sum().backward()
        >>> whole.grad
        tensor([[2., 2., 2.]])
    """

    def __init__(self) -> None:
        self._wholes: list[Tensor] = []
        self._seen: tuple[list[int], list[bool]] = ([], [])
        self._tensors: dict[str, Tensor] = {}

    def tensors(self, wholes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Each whole ``(1, *shape)`` as ``(*shape)``; those that train lead their gradients back."""
        if is_watched() or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled():
            return {name: whole.squeeze(0) for name, whole in wholes.items()}
        now = list(wholes.values())
        seen = (list(map(Tensor.data_ptr, now)), list(map(REQUIRES_GRAD, now)))
        # What is kept holds on to its memory: another tensor in the same place has another address.
        if seen != self._seen or not all(map(is_, now, self._wholes)):
            if not all(whole.is_leaf for whole in now):
                return {name: whole.squeeze(0) for name, whole in wholes.items()}
            self._tensors = _made(wholes)
            self._wholes, self._seen = now, seen
        return self._tensors


def _made(wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trained = list({id(whole): whole for whole in wholes.values() if whole.requires_grad}.values())
    with torch.enable_grad():
        owns = _Boundary.apply(*trained) if trained else ()
    made = dict(zip(map(id, trained), owns, strict=True))
    return {name: made[id(whole)] if whole.requires_grad else _own(whole) for name, whole in wholes.items()}


def _own(whole: Tensor) -> Tensor:
    """Without the models' axis, and to autograd no view: a view would follow its base's history."""
    return whole.detach().squeeze(0).detach()
