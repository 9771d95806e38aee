"""The gradients of stacked parameters, while they come together from groups of models that go one after another.

large parameter    group 0's gradient --copy, while it is in the cache--> buffer[0:k]
group 1's gradient --copy--------------------------> buffer[k:2k]     (or a rule writes it there)
small ones         kept as they come, put together at the end: that takes one op for each, and no buffer
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.fusion.shares import LARGE_BYTES, GradientMemory

__all__ = ["Gather", "Places", "split"]


class Gather:
    """The gradients of one step.

    Args:
        memory: where the buffers come from.
        wholes: the stacked parameters.
        num_groups: how many groups of models bring gradients.
        size: models in a group; those of single models come without the models' axis.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(2, 3))
        >>> gather = Gather(GradientMemory(), [whole], 2, 1)
        >>> gather.bring(1, {id(whole): torch.ones(3)})
        >>> gather.whole(whole)
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """

    def __init__(self, memory: GradientMemory, wholes: list[Tensor], num_groups: int, size: int) -> None:
        self.memory = memory
        self._size = size
        self._missing = {id(whole): set(range(num_groups)) for whole in wholes}
        self._buffers = {id(whole): memory.like(whole) for whole in wholes if whole.nbytes >= LARGE_BYTES}
        self._places = {key: split(buffer, size) for key, buffer in self._buffers.items()}
        self._kept: dict[int, list[Tensor | None]] = {
            id(whole): [None] * num_groups for whole in wholes if id(whole) not in self._buffers
        }
        self._given: set[tuple[int, int]] = set()

    def bring(self, index: int, grads: Mapping[int, Tensor]) -> None:
        """Take in a group's gradients, by the ids of the stacked parameters."""
        places: list[Tensor] = []
        others: list[Tensor] = []
        for key, grad in grads.items():
            self._missing[key].discard(index)
            if key in self._kept:
                self._kept[key][index] = grad
            elif not self.is_at_place(key, index, grad):
                places.append(self._places[key][index])
                others.append(grad)
        if places:
            torch._foreach_copy_(places, others)

    def place(self, key: int, index: int) -> Tensor | None:
        """Where a rule may write a group's gradient; None if there is no place, or one was given already."""
        if key in self._kept or (key, index) in self._given:
            return None
        self._given.add((key, index))
        return self._places[key][index].detach()  # nobody else holds this one, so it becomes the leaf's `.grad`

    def is_at_place(self, key: int, index: int, grad: Tensor) -> bool:
        """Whether a rule has written a group's gradient where it belongs."""
        return (key, index) in self._given and grad.data_ptr() == self._places[key][index].data_ptr()

    def whole(self, whole: Tensor) -> Tensor | None:
        """The gradient of all models; None where none of them has one."""
        key = id(whole)
        missing = self._missing[key]
        kept = self._kept.get(key)
        if kept is not None:
            shape = whole.shape[1:] if self._size == 1 else (self._size, *whole.shape[1:])
            some = next((grad for grad in kept if grad is not None), None)
            if some is None:
                return None
            filled = [some.new_zeros(shape) if grad is None else grad for grad in kept]
            return torch.stack(filled) if self._size == 1 else torch.cat(filled)
        if len(missing) == len(self._places[key]):
            return None
        for index in missing:
            self._places[key][index].zero_()
        return self._buffers[key]


class Places(GradientMemory):
    """The places of the groups' gradients in the stacked ones, as memory for a rule that writes gradients itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gather: Gather | None = None  # of the step at hand
        self.of: dict[int, tuple[int, int]] = {}  # by the id of a group's leaf: the stacked parameter's, and the group

    def place(self, whole: Tensor) -> Tensor | None:
        """Where the gradient of a group's leaf belongs; None where that is not known, or was asked for already."""
        if self.gather is None or id(whole) not in self.of:
            return None
        return self.gather.place(*self.of[id(whole)])


def split(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    """Each group's part; of a group of one, without the models' axis."""
    return whole.unbind(0) if size == 1 else whole.split(size)
