"""Parts of a large stacked parameter, whose gradients go straight to their places in the stacked gradient.

``whole.unbind()`` would keep the gradients of all parts until the last one is there, and then copy them all: twice the
memory, and cold. Here each part's gradient is copied as soon as it is known, while it is still in the cache:

    whole --hub--> parts --model i--> ...        forward
    whole.grad <--hub-- buffer[i].copy_(grad)    backward; the hub hands on the buffer when all parts are through

Buffers are kept from step to step, because malloc gives large blocks back to the system, and what a step then pays in
page faults is more than the copy. A buffer is used again once nobody else holds its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientMemory", "shares"]


class GradientMemory:
    """Blocks of memory for gradients, used again when they are free."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.UntypedStorage] = {}

    def like(self, whole: Tensor) -> Tensor:
        """A contiguous tensor of this one's shape, its content undefined."""
        key = (id(whole), whole.shape, whole.dtype, whole.device)
        kept = self._storages.get(key)
        if kept is not None and torch._C._storage_Use_Count(kept._cdata) == 1:
            return torch.empty(0, dtype=whole.dtype, device=whole.device).set_(kept, 0, whole.shape)  # type: ignore[call-overload]
        fresh = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
        self._storages[key] = fresh.untyped_storage()
        return fresh


class _Gather:
    """The gradient of one backward pass, while it comes together."""

    def __init__(self, memory: GradientMemory, whole: Tensor) -> None:
        self.memory = memory
        self.whole = whole
        self.buffer: Tensor | None = None
        self.missing: set[int] = set()


class _Hub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, gather: _Gather) -> Tensor:
        ctx.gather = gather
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gather = ctx.gather
        if gather.buffer is not None:
            for index in gather.missing:
                gather.buffer[index].zero_()
            gather.buffer = None
        return grads[0], None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hub: Tensor, index: int, gather: _Gather) -> Tensor:
        ctx.index, ctx.gather = index, gather
        return hub[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, gather = ctx.index, ctx.gather
        size = gather.whole.shape[0]
        if torch.is_grad_enabled():  # somebody wants to differentiate again
            zero = torch.zeros_like(grads[0])
            return torch.stack([grads[0] if each == index else zero for each in range(size)]), None, None
        first = gather.buffer is None
        if first:
            gather.buffer = gather.memory.like(gather.whole)
            gather.missing = set(range(size))
        gather.buffer[index].copy_(grads[0])
        gather.missing.discard(index)
        return gather.buffer if first else None, None, None  # the hub gets it once; the others fill it


def shares(whole: Tensor, memory: GradientMemory) -> tuple[Tensor, ...]:
    """As ``whole.unbind(0)``, of a parameter.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(2, 3))
        >>> first, second = shares(whole, GradientMemory())
        >>> (3 * first + 5 * second).sum().backward()
        >>> whole.grad.tolist()
        [[3.0, 3.0, 3.0], [5.0, 5.0, 5.0]]
    """
    gather = _Gather(memory, whole)
    hub = _Hub.apply(whole, gather)
    return tuple(_Part.apply(hub, index, gather) for index in range(whole.shape[0]))
