r"""Parts of the stacked tensors for models that run one at a time, and the way of their gradients back.

    whole (B, *shape) --Parts--> model 0's, model 1's, ...     made once, kept from step to step

Parts are the outputs of one node, whose backward joins their gradients. Where each model goes to the end of its own
backward before the next one begins, the gradients of its parts are asked for, and gathered (`Gathered`):

    large parameter    a model's gradient --copied--> place[i]
    small ones         kept as they come, joined at the end: that takes one op for each, and no place

Places are kept from step to step, because malloc gives large blocks back to the system, and what a step then pays in
page faults is more than the copy: three layers of 1,024 and 8 models take 161 ms a step with gradients that are stacked
at the end, 84 ms with places. A place is used again once nothing else holds its memory.

Models without a gradient of a parameter that other models have one of, which a stacked gradient cannot tell.

    model 0's branch reads `a`        a.grad[0] is a gradient,  b.grad[0] zeros
    model 1's branch reads `b`        a.grad[1] zeros,          b.grad[1] a gradient

Alone, an optimizer would leave model 1's `a` as it is, where zeros let momentum and weight decay move it. So each
backward that joins the gradients of models that ran one after another notes whose it had to fill, and the optimizers of
`hocket.optim` ask for it. What has been noted holds for that very gradient, and as long as the models' parts are zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

LARGE_BYTES = 2**20  # of a parameter, from which its gradient has a place of its own
REQUIRES_GRAD = attrgetter("requires_grad")


class GradientMemory:
    """Blocks of memory for gradients, used again when they are free."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.UntypedStorage] = {}

    def place(self, whole: Tensor) -> Tensor | None:
        """An uninitialised contiguous tensor like a parameter, or None unless that is large and in the CPU's memory."""
        if not whole.is_leaf or whole.nbytes < LARGE_BYTES or whole.device.type != "cpu":
            return None
        key = (id(whole), whole.shape, whole.dtype)
        kept = self._storages.get(key)
        if kept is not None and torch._C._storage_Use_Count(kept._cdata) == 1:
            return torch.empty(0, dtype=whole.dtype).set_(kept, 0, whole.shape)  # type: ignore[call-overload]
        fresh = torch.empty(whole.shape, dtype=whole.dtype)
        self._storages[key] = fresh.untyped_storage()
        return fresh


class Parts:
    """Each model's part of the stacked tensors, by name, made anew when these are replaced or moved."""

    def __init__(self) -> None:
        self._wholes: list[Tensor] = []
        self._places: list[int] = []
        self._trained: list[bool] = []
        self._parts: list[dict[str, Tensor]] = []

    def are_of(self, wholes: Mapping[str, Tensor]) -> bool:
        """True if what was made last is parts of these tensors, where they lie now."""
        return self.lie_as(wholes) and list(map(REQUIRES_GRAD, wholes.values())) == self._trained

    def lie_as(self, wholes: Mapping[str, Tensor]) -> bool:
        """True if what was made last lies where these tensors do, though others of them may train."""
        now = list(wholes.values())
        # A kept tensor keeps its memory: another tensor in its place has another address.
        return (
            bool(self._parts) and list(map(Tensor.data_ptr, now)) == self._places and all(map(is_, now, self._wholes))
        )

    def of(self, wholes: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each model, by name. Tied parameters are one tensor."""
        if not self.are_of(wholes):
            now = list(wholes.values())
            trained = list({id(whole): whole for whole in now if whole.requires_grad}.values())
            of = {id(whole): _owns(whole) for whole in now if not whole.requires_grad} | _linked(trained)
            for whole in trained:
                for index, part in enumerate(of[id(whole)]):
                    part._hocket_row = (whole, index)  # type: ignore[attr-defined]
            columns = zip(*(of[id(whole)] for whole in now), strict=True)
            self._parts = [dict(zip(wholes, column, strict=True)) for column in columns]
            self._wholes, self._places = now, list(map(Tensor.data_ptr, now))
            self._trained = list(map(REQUIRES_GRAD, now))
        return self._parts


def _linked(wholes: list[Tensor]) -> dict[int, tuple[Tensor, ...]]:
    """Each model's parts of the stacked parameters, by id. They are outputs of one node with versions of their own."""
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
        ctx.wholes = wholes
        return tuple([own for whole in wholes for own in _owns(whole)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads) // len(ctx.wholes)
        if count == 1:
            return tuple([None if grad is None else grad.unsqueeze(0) for grad in grads])
        columns = [grads[start : start + count] for start in range(0, len(grads), count)]
        for whole, column in zip(ctx.wholes, columns, strict=True):
            note_absent(whole, absent(column))
        return tuple(map(_joined, columns))


def _owns(whole: Tensor) -> tuple[Tensor, ...]:
    """Each model's part, and to autograd no views: a view would follow its base's history."""
    rows = [row.data for row in whole.data.unbind(0)]
    is_parameter = isinstance(whole, nn.Parameter)
    return tuple([nn.Parameter(row, requires_grad=False) if is_parameter else row for row in rows])


def _joined(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the gradients of all models, with zeros for None. Returns None if no model has a gradient."""
    some = next((grad for grad in grads if grad is not None), None)
    if some is None:
        return None
    filled = [torch.zeros_like(some) if grad is None else grad for grad in grads]
    return torch.stack(filled) if len(filled) > 1 else filled[0].unsqueeze(0)


class Gathered:
    """The gradient of a stacked parameter, while it comes together from models that go one after another."""

    def __init__(self, whole: Tensor, memory: GradientMemory) -> None:
        self._place = memory.place(whole)
        self._grads: list[Tensor | None] = []

    def take(self, grad: Tensor | None) -> None:
        if self._place is not None and grad is not None:
            grad = self._place[len(self._grads)].copy_(grad)
        self._grads.append(grad)

    def absent(self) -> frozenset[int]:
        """The models that had none."""
        return absent(self._grads)

    def whole(self) -> Tensor | None:
        """The gradient of all models, or None if no model has one."""
        if self._place is None or any(grad is None for grad in self._grads):
            return _joined(self._grads)
        return self._place


_SAID = {"is_leaf": True, "grad_fn": None, "retains_grad": False, "output_nr": 0}
ASKED = frozenset((*_SAID, "grad"))


def as_leaf(tensor: Any, name: str) -> Any:
    """The attribute of a model's part as a leaf would have it, or `NotImplemented` for other tensors and attributes."""
    row = getattr(tensor, "_hocket_row", None) if name in ASKED else None
    if row is None:
        return NotImplemented
    if name != "grad":
        return _SAID[name]
    whole, index = row
    return None if whole.grad is None else whole.grad[index]


class SaidOfLeaves(TorchFunctionMode):
    """While the block lasts, parts of stacked parameters answer as leaves."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__" and isinstance(args[0], Tensor):
            found = as_leaf(args[0], getattr(func.__self__, "__name__", ""))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


_NOTED = WeakTensorKeyDictionary()  # for each stacked parameter its gradient, and the models without one
_PENDING = WeakTensorKeyDictionary()  # the same models, while a backward goes on


def absent(grads: Sequence[Tensor | None]) -> frozenset[int]:
    """The models whose gradient is None."""
    return frozenset([model for model, grad in enumerate(grads) if grad is None])


def note_absent(whole: Tensor, models: frozenset[int]) -> None:
    """Note in a backward which models give a stacked parameter no gradient."""
    if not (models or _NOTED or _PENDING) or not whole.is_leaf:
        return
    if whole in _PENDING:  # another call of the models in the same backward
        _PENDING[whole] &= models
        return
    before = whole.grad
    _PENDING[whole] = models if before is None else models & _noted(whole, before)

    def note() -> None:
        found = _PENDING.pop(whole)
        _NOTED.pop(whole, None)
        if found and whole.grad is not None:
            _NOTED[whole] = weakref.ref(whole.grad), found

    torch.autograd.Variable._execution_engine.queue_callback(note)


def models_without_gradient(whole: Tensor) -> list[int]:
    """The models to which the gradient of a stacked parameter says nothing."""
    if not _NOTED or whole not in _NOTED or whole.grad is None:
        return []
    noted = sorted(_noted(whole, whole.grad))
    if torch._C._len_torch_dispatch_stack():  # of what is captured no values may be looked at
        return noted
    return [model for model in noted if not whole.grad[model].any()]


def _noted(whole: Tensor, grad: Tensor) -> frozenset[int]:
    of, models = _NOTED.get(whole, (None, frozenset()))
    return models if of is not None and of() is grad else frozenset()
