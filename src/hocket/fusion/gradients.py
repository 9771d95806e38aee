r"""Parts of the stacked tensors for models that run a few at a time, and the way of their gradients back.

    whole (B, *shape) --Parts--> group 0's, group 1's, ...     made once, kept from step to step

Two ways lead back. Where the groups' forwards come first and one backward goes through all of them, the parts are the
outputs of one node (`linked_parts`), whose backward joins them. Where each group goes to the end of its backward before
the next one begins, the parts are leaves (`leaf_parts`), and a `Gather` takes their gradients in:

    large parameter    a group's gradient --copied while it is in the cache, or written there by a rule--> buffer[i]
    small ones         kept as they come, joined at the end: that takes one op for each, and no buffer

Buffers are kept from step to step, because malloc gives large blocks back to the system, and what a step then pays in
page faults is more than the copy. A buffer is used again once nobody else holds its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGE_BYTES", "Gather", "GradientMemory", "Parts", "leaf_parts", "linked_parts", "split"]

LARGE_BYTES = 2**20  # of a parameter, from which its gradient has a place of its own
REQUIRES_GRAD = attrgetter("requires_grad")
PartsOf = Mapping[int, tuple[Tensor, ...]]  # by the id of the stacked parameter: each group's


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


class Parts:
    """Each group's part of the stacked tensors, by name; made anew when the stacked ones are others, or lie elsewhere.

    Args:
        num_groups: how many.
        size: models in a group; parts of single models have no models' axis.
        make: the parts of those that train.

    Example:
        >>> whole = torch.nn.Parameter(torch.ones(2, 3))
        >>> first, second = Parts(2, 1, linked_parts).of({"weight": whole})
        >>> (3 * first["weight"] + 5 * second["weight"]).sum().backward()
        >>> whole.grad.tolist()
        [[3.0, 3.0, 3.0], [5.0, 5.0, 5.0]]
    """

    def __init__(self, num_groups: int, size: int, make: Callable[[list[Tensor], int], PartsOf]) -> None:
        self._num_groups = num_groups
        self._size = size
        self._make = make
        self._wholes: list[Tensor] = []
        self._seen: tuple[list[int], list[bool]] = ([], [])
        self._parts: list[dict[str, Tensor]] = []

    def of(self, wholes: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """One group's tensors after the other's; tied ones are one tensor."""
        now = list(wholes.values())
        seen = (list(map(Tensor.data_ptr, now)), list(map(REQUIRES_GRAD, now)))
        # What is kept holds on to its memory: another tensor in the same place has another address.
        if not self._parts or seen != self._seen or not all(map(is_, now, self._wholes)):
            trained = list({id(whole): whole for whole in now if whole.requires_grad}.values())
            of = dict(self._make(trained, self._size))
            for whole in now:
                if id(whole) not in of:
                    of[id(whole)] = _owns(whole, self._size)
            self._parts = [
                {name: of[id(whole)][index] for name, whole in wholes.items()} for index in range(self._num_groups)
            ]
            self._wholes, self._seen = now, seen
        return self._parts


def linked_parts(wholes: list[Tensor], size: int) -> PartsOf:
    """Parts whose gradients go back to the stacked parameters through one node.

    A view of each in each step costs two nodes for each, forth and back: on a small model as much as its ops. A part
    shares memory and version count with its whole, so an update shows in it, and an update between forward and backward
    is an error as ever.
    """
    if not wholes:
        return {}
    with torch.enable_grad():
        flat = _Link.apply(size, *wholes)
    count = len(flat) // len(wholes)
    return {id(whole): flat[number * count : (number + 1) * count] for number, whole in enumerate(wholes)}


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: int, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.size = size
        return tuple([own for whole in wholes for own in _owns(whole, size)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads) // (len(ctx.needs_input_grad) - 1)
        if count == ctx.size == 1:
            return (None, *[None if grad is None else grad.unsqueeze(0) for grad in grads])
        groups = [grads[start : start + count] for start in range(0, len(grads), count)]
        return (None, *[joined(group, ctx.size) for group in groups])


def leaf_parts(wholes: list[Tensor], size: int) -> PartsOf:
    """Parts that are leaves of a graph of their own."""
    return {id(whole): tuple([own.requires_grad_() for own in _owns(whole, size)]) for whole in wholes}


def split(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    """Each group's part; of a group of one, without the models' axis."""
    return whole.unbind(0) if size == 1 else whole.split(size)


def _owns(whole: Tensor, size: int) -> tuple[Tensor, ...]:
    """As `split`, and to autograd no views: a view would follow its base's history."""
    return tuple([own.detach() for own in split(whole.detach(), size)])


def joined(grads: tuple[Tensor | None, ...], size: int) -> Tensor | None:
    """The gradient of all models from the groups' (those that are None are zero); None where no group has one."""
    some = next((grad for grad in grads if grad is not None), None)
    if some is None:
        return None
    filled = [torch.zeros_like(some) if grad is None else grad for grad in grads]
    if len(filled) == 1:
        return filled[0].unsqueeze(0) if size == 1 else filled[0]
    return torch.stack(filled) if size == 1 else torch.cat(filled)


class Gather:
    """The gradients of one step, while they come together from groups that go one after another.

    Args:
        memory: where the buffers come from.
        parts: as of `leaf_parts`.
        wholes: the stacked parameters.
        size: models in a group.
    """

    def __init__(self, memory: GradientMemory, parts: PartsOf, wholes: list[Tensor], size: int) -> None:
        self.memory = memory
        self._size = size
        self._buffers = {id(whole): memory.like(whole) for whole in wholes if whole.nbytes >= LARGE_BYTES}
        self._places = {key: split(buffer, size) for key, buffer in self._buffers.items()}
        self._grads: dict[int, list[Tensor | None]] = {key: [None] * len(own) for key, own in parts.items()}
        self._given: set[tuple[int, int]] = set()

    def bring(self, key: int, index: int, grad: Tensor) -> None:
        """Take in a group's gradient of the stacked parameter with this id."""
        places = self._places.get(key)
        if places is not None and not self.is_at_place(key, index, grad):
            places[index].copy_(grad)
        self._grads[key][index] = grad if places is None else places[index]

    def place(self, key: int, index: int) -> Tensor | None:
        """Where a rule may write a group's gradient; None if there is no place, or one was given already."""
        if key not in self._places or (key, index) in self._given:
            return None
        self._given.add((key, index))
        return self._places[key][index].detach()  # nobody else holds this one, so it becomes the leaf's `.grad`

    def is_at_place(self, key: int, index: int, grad: Tensor) -> bool:
        """Whether a rule has written a group's gradient where it belongs."""
        return (key, index) in self._given and grad.data_ptr() == self._places[key][index].data_ptr()

    def whole(self, whole: Tensor) -> Tensor | None:
        """The gradient of all models; None where none of them has one."""
        key = id(whole)
        grads, places = self._grads[key], self._places.get(key)
        if places is None:
            return joined(tuple(grads), self._size)
        if all(grad is None for grad in grads):
            return None
        for grad, place in zip(grads, places, strict=True):
            if grad is None:
                place.zero_()
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
