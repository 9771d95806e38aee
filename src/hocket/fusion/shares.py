"""Parts of a large stacked parameter, whose gradients go straight to their places in the stacked gradient.

``whole.unbind()`` would keep the gradients of all parts until the last one is there, and then copy them all: twice the
memory, and cold. Here each part's gradient is copied as soon as it is known, while it is still in the cache:

    whole --hub--> parts --model i--> ...        forward
    whole.grad <--hub-- buffer[i].copy_(grad)    backward; the hub hands on the buffer when all parts are through

Buffers, and the last gradient of each parameter's parts, are kept from step to step, because malloc gives large blocks
back to the system, and what a step then pays in page faults is more than the copy. A buffer is used again once nobody
else holds its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGE_BYTES", "GradientMemory", "shares"]

LARGE_BYTES = 2**20  # of a parameter, from which its gradient has a place of its own


class GradientMemory:
    """Blocks of memory for gradients, used again when they are free."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.UntypedStorage] = {}
        self._held: dict[int, Tensor] = {}

    def like(self, whole: Tensor) -> Tensor:
        """A contiguous tensor of this one's shape, its content undefined."""
        key = (id(whole), whole.shape, whole.dtype, whole.device)
        kept = self._storages.get(key)
        if kept is not None and torch._C._storage_Use_Count(kept._cdata) == 1:
            return torch.empty(0, dtype=whole.dtype, device=whole.device).set_(kept, 0, whole.shape)  # type: ignore[call-overload]
        fresh = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
        self._storages[key] = fresh.untyped_storage()
        return fresh

    def place(self, whole: Tensor) -> Tensor | None:
        """As `like`, for a large parameter in the CPU's memory; None for any other."""
        is_large = whole.is_leaf and whole.nbytes >= LARGE_BYTES and whole.device.type == "cpu"
        return self.like(whole) if is_large else None

    def hold(self, whole: Tensor, part: Tensor) -> None:
        """Keep a part's gradient, whose content is not needed any more, until the next part's is there.

        So the one after that finds a free block of its size. Freed at once it would be the end of the heap, and malloc
        would give it back to the system: 40,000 page faults a step with 4 models of ResNet-18, and none this way.
        """
        self._held[id(whole)] = part


class _Place:
    """Models `start` to before `stop`; of a single one without the models' axis."""

    def __init__(self, start: int, stop: int, is_single: bool) -> None:
        self.start = start
        self.stop = stop
        self.index: Any = start if is_single else slice(start, stop)


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


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hub: Tensor, place: _Place, gather: _Gather) -> Tensor:
        ctx.place, ctx.gather = place, gather
        return hub[place.index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place, gather = ctx.place, ctx.gather
        whole = gather.whole
        if torch.is_grad_enabled():  # somebody wants to differentiate again
            own = grads[0].unsqueeze(0) if isinstance(place.index, int) else grads[0]
            before, after = place.start, whole.shape[0] - place.stop
            shape = whole.shape[1:]
            return torch.cat([own.new_zeros(before, *shape), own, own.new_zeros(after, *shape)]), None, None
        first = gather.buffer is None
        if first:
            gather.buffer = gather.memory.like(whole)
            gather.missing = set(range(whole.shape[0]))
        assert gather.buffer is not None
        gather.buffer[place.index].copy_(grads[0])
        gather.memory.hold(whole, grads[0])
        gather.missing -= set(range(place.start, place.stop))
        return gather.buffer if first else None, None, None  # the hub gets it once; the others fill it


def shares(whole: Tensor, memory: GradientMemory, size: int = 1) -> tuple[Tensor, ...]:
    """As ``whole.unbind(0)``, or ``whole.split(size)`` for a size above one, of a parameter.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(2, 3))
        >>> first, second = shares(whole, GradientMemory())
        >>> (3 * first + 5 * second).sum().backward()
        >>> whole.grad.tolist()
        [[3.0, 3.0, 3.0], [5.0, 5.0, 5.0]]
    """
    gather = _Gather(memory, whole)
    hub = _Hub.apply(whole, gather)
    total = whole.shape[0]
    places = [_Place(start, min(start + size, total), size == 1) for start in range(0, total, size)]
    return tuple(_Share.apply(hub, place, gather) for place in places)
