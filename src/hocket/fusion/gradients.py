r"""Parts of the stacked tensors for models that run one at a time, and the way of their gradients back.

    whole (B, *shape) --Parts--> model 0's, model 1's, ...     made once, kept from step to step

Two ways lead back. Where all forwards come first and one backward goes through all of them, the parts are the outputs
of one node (`linked_parts`), whose backward joins them. Where each model goes to the end of its backward before the
next one begins, the parts are leaves (`leaf_parts`), and a `Gather` takes their gradients in:

    large parameter    a model's gradient --copied while it is in the cache--> buffer[i]
    small ones         kept as they come, joined at the end: that takes one op for each, and no buffer

Buffers are kept from step to step, because malloc gives large blocks back to the system, and what a step then pays in
page faults is more than the copy. A buffer is used again once nobody else holds its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LARGE_BYTES", "Gather", "GradientMemory", "Parts", "leaf_parts", "linked_parts"]

LARGE_BYTES = 2**20  # of a parameter, from which its gradient has a place of its own
REQUIRES_GRAD = attrgetter("requires_grad")
PartsOf = Mapping[int, tuple[Tensor, ...]]  # by the id of the stacked parameter: each model's


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

    def place(self, whole: Tensor) -> Tensor | None:
        """As `like`, for a large parameter in the CPU's memory; None for any other."""
        is_large = whole.is_leaf and whole.nbytes >= LARGE_BYTES and whole.device.type == "cpu"
        return self.like(whole) if is_large else None


class Parts:
    """Each model's part of the stacked tensors, by name; made anew when the stacked ones are others, or lie elsewhere.

    Args:
        make: the parts of those that train.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(2, 3))
        >>> first, second = Parts(linked_parts).of({"weight": whole})
        >>> (3 * first["weight"] + 5 * second["weight"]).sum().backward()
        >>> whole.grad.tolist()
        [[3.0, 3.0, 3.0], [5.0, 5.0, 5.0]]
    """

    def __init__(self, make: Callable[[list[Tensor]], PartsOf]) -> None:
        self._make = make
        self._wholes: list[Tensor] = []
        self._seen: tuple[list[int], list[bool]] = ([], [])
        self._parts: list[dict[str, Tensor]] = []

    def are_of(self, wholes: Mapping[str, Tensor]) -> bool:
        """Whether what was made last is parts of these tensors, where they lie now."""
        now = list(wholes.values())
        # What is kept holds on to its memory: another tensor in the same place has another address.
        return bool(self._parts) and _seen(now) == self._seen and all(map(is_, now, self._wholes))

    def lie_as(self, wholes: Mapping[str, Tensor]) -> bool:
        """Whether what was made last lies where these tensors do, though others of them may train."""
        now = list(wholes.values())
        return bool(self._parts) and _seen(now)[0] == self._seen[0] and all(map(is_, now, self._wholes))

    def of(self, wholes: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """One model's tensors after the other's; tied ones are one tensor."""
        if not self.are_of(wholes):
            now = list(wholes.values())
            trained = list({id(whole): whole for whole in now if whole.requires_grad}.values())
            of = dict(self._make(trained))
            for whole in now:
                if id(whole) not in of:
                    of[id(whole)] = _owns(whole)
            for whole in trained:
                for index, part in enumerate(of[id(whole)]):
                    part._hocket_row = (whole, index)  # type: ignore[attr-defined]
            columns = zip(*(of[id(whole)] for whole in now), strict=True)
            self._parts = [dict(zip(wholes, column, strict=True)) for column in columns]
            self._wholes, self._seen = now, _seen(now)
        return self._parts


def _seen(wholes: list[Tensor]) -> tuple[list[int], list[bool]]:
    return list(map(Tensor.data_ptr, wholes)), list(map(REQUIRES_GRAD, wholes))


def linked_parts(wholes: list[Tensor]) -> PartsOf:
    """Parts whose gradients go back to the stacked parameters through one node.

    A view of each in each step costs two nodes for each, forth and back: on a small model as much as its ops. A part
    shares its memory with the whole, so an update shows in it. It counts its own versions: a model that writes into its
    tensors in its forward is no reason for another one's backward to fail.
    """
    if not wholes:
        return {}
    with torch.enable_grad():
        flat = _Link.apply(*wholes)
    count = len(flat) // len(wholes)
    return {id(whole): flat[number * count : (number + 1) * count] for number, whole in enumerate(wholes)}


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_wholes = len(wholes)
        return tuple([own for whole in wholes for own in _owns(whole)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads) // ctx.num_wholes
        if count == 1:
            return tuple([None if grad is None else grad.unsqueeze(0) for grad in grads])
        return tuple([_joined(grads[start : start + count]) for start in range(0, len(grads), count)])


def leaf_parts(wholes: list[Tensor]) -> PartsOf:
    """Parts that are leaves of a graph of their own."""
    return {id(whole): tuple([own.requires_grad_() for own in _owns(whole)]) for whole in wholes}


def _owns(whole: Tensor) -> tuple[Tensor, ...]:
    """Each model's part, and to autograd no views: a view would follow its base's history."""
    rows = [row.data for row in whole.data.unbind(0)]
    return (
        tuple([nn.Parameter(row, requires_grad=False) for row in rows])
        if isinstance(whole, nn.Parameter)
        else tuple(rows)
    )


def _joined(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient of all models from each one's (those that are None are zero); None where no model has one."""
    some = next((grad for grad in grads if grad is not None), None)
    if some is None:
        return None
    filled = [torch.zeros_like(some) if grad is None else grad for grad in grads]
    return torch.stack(filled) if len(filled) > 1 else filled[0].unsqueeze(0)


class Gather:
    """The gradients of one step, while they come together from models that go one after another.

    Args:
        memory: where the buffers come from.
        wholes: the stacked parameters.
    """

    def __init__(self, memory: GradientMemory, wholes: list[Tensor]) -> None:
        self.memory = memory
        self._buffers = {id(whole): memory.like(whole) for whole in wholes if whole.nbytes >= LARGE_BYTES}
        self._grads: dict[int, list[Tensor | None]] = {id(whole): [None] * len(whole) for whole in wholes}

    def bring(self, key: int, index: int, grad: Tensor) -> None:
        """Take in a model's gradient of the stacked parameter with this id."""
        if key in self._buffers:
            grad = self._buffers[key][index].copy_(grad)
        self._grads[key][index] = grad

    def whole(self, whole: Tensor) -> Tensor | None:
        """The gradient of all models; None where none of them has one."""
        grads, buffer = self._grads[id(whole)], self._buffers.get(id(whole))
        if buffer is None:
            return _joined(grads)
        if all(grad is None for grad in grads):
            return None
        for index, grad in enumerate(grads):
            if grad is None:
                buffer[index].zero_()
        return buffer
