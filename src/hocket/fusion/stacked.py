"""A value of all models: a tensor whose first axis is the model.

The layout of its memory is not fixed, and that is the point. A grouped convolution wants and gives ``(N, B, C, ...)``,
a batched matrix product ``(B, N, ...)``. Both are kept as *views* with the models first. torch's pointwise kernels
keep the order of memory they find, so a chain of convolution, normalisation, activation and pooling copies nothing:

    conv            (N, B*C, H, W)  --view, transpose-->  (B, N, C, H, W), strides of (N, B, C, H, W)
    relu            same strides
    conv            --transpose, reshape-->  (N, B*C, H, W): a view again

A third layout, ``(B, C, N, ...)``, is what a convolution one element wide gives as a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unwatched() -> Iterator[None]:
    """While this is open, no tracer and no transform sees what is computed, nor is it made for inference only."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes():
        yield


class Stacked:
    """``tensor`` is ``(B, ...)``: the value of each of B models. `parts` gives them one by one."""

    __slots__ = ("_parts", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._parts: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        return f"Stacked({tuple(self.tensor.shape)})"

    @property
    def shape(self) -> torch.Size:
        """The shape of one model's value."""
        return self.tensor.shape[1:]

    @property
    def ndim(self) -> int:
        """The rank of one model's value."""
        return self.tensor.ndim - 1

    def parts(self) -> tuple[Tensor, ...]:
        """One view per model. They are made once, so that their gradients are joined once."""
        if self._parts is None:
            self._parts = self.tensor.unbind(0)
        return self._parts


class ModelValues:
    """A value of each of B models that is not one stacked tensor: numbers, options, tensors of different shapes.

    Example:
        >>> ModelValues((0.1, 0.2)).stacked(torch.float32, torch.device("cpu")).tensor
        tensor([0.1000, 0.2000])
    """

    __slots__ = ("_stacked", "values")

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self._stacked: dict[Any, Stacked] = {}

    def __repr__(self) -> str:
        return f"ModelValues{self.values}"

    @property
    def are_numbers(self) -> bool:
        """True if all values are ints, or all are floats."""
        return {type(value) for value in self.values} in ({int}, {float})

    def stacked(self, dtype: torch.dtype, device: torch.device) -> Stacked:
        """Numbers as one tensor ``(B,)``."""
        if (dtype, device) not in self._stacked:
            with unwatched():
                self._stacked[dtype, device] = Stacked(torch.tensor(self.values, dtype=dtype, device=device))
        return self._stacked[dtype, device]


def is_stacked(tree: Any) -> bool:
    """True if any value in a tree of arguments belongs to the models one by one."""
    if isinstance(tree, (Stacked, ModelValues)):
        return True
    if isinstance(tree, (tuple, list)):
        return any(map(is_stacked, tree))
    if isinstance(tree, dict):
        return any(map(is_stacked, tree.values()))
    if isinstance(tree, slice):
        return is_stacked((tree.start, tree.stop, tree.step))
    return False


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of arguments with every leaf changed."""
    if isinstance(tree, tuple):
        return as_type_of(tree, [map_tree(each, change) for each in tree])
    if isinstance(tree, list):
        return [map_tree(each, change) for each in tree]
    if isinstance(tree, dict):
        return {name: map_tree(each, change) for name, each in tree.items()}
    if isinstance(tree, slice):
        return slice(map_tree(tree.start, change), map_tree(tree.stop, change), map_tree(tree.step, change))
    return change(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The axes of what torch makes like a tensor, those with the longest steps in memory first.

    Example:
        >>> memory_order(torch.ones(2, 3, 4).transpose(0, 1))
        (1, 0, 2)
    """
    with torch._C.DisableTorchFunction():
        strides = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def laid_out(tree: Any, orders: Sequence[tuple[int, ...]]) -> Any:
    """A tree of arguments whose tensors have their last axes in these orders in memory, one for each tensor."""
    remaining = iter(orders)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, (Stacked, Tensor)) or (order := next(remaining, None)) is None:
            return leaf
        tensor = unwrap(leaf)
        first = tensor.ndim - len(order)
        axes = [*range(first), *(first + axis for axis in order)]
        ordered = tensor.permute(axes)
        if ordered.is_contiguous():
            return leaf
        copy = ordered.contiguous().permute([axes.index(axis) for axis in range(tensor.ndim)])
        return Stacked(copy) if isinstance(leaf, Stacked) else copy

    return map_tree(tree, change)


def as_type_of(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of these items with the names of another one (`typing.NamedTuple`, ``torch.return_types``), if any.

    Example:
        >>> as_type_of(torch.ones(2).max(0), [1, 2]).indices
        2
    """
    if type(like) is tuple:
        return tuple(items)
    if hasattr(like, "_make"):
        return like._make(items)
    return type(like)(items) if hasattr(like, "n_sequence_fields") else tuple(items)


def part(tree: Any, model: int, *, writes: bool = False) -> Any:
    """A tree of arguments as one model sees it. Views that an op writes to are made one by one, as autograd asks."""

    def of_model(value: Any) -> Any:
        if isinstance(value, ModelValues):
            return value.values[model]
        if not isinstance(value, Stacked):
            return value
        return value.tensor[model] if writes else value.parts()[model]

    return map_tree(tree, of_model)


def unwrap(tree: Any) -> Any:
    """A tree with the tensors themselves in place of `Stacked`."""
    return map_tree(tree, lambda value: value.tensor if isinstance(value, Stacked) else value)


def with_model_dim(value: Any, num_models: int) -> Tensor:
    """A tensor ``(B, ...)``: of a stacked value, or of a shared one, repeated without a copy."""
    if isinstance(value, Stacked):
        return value.tensor
    return value.unsqueeze(0).expand(num_models, *value.shape)


DTYPES = {int: torch.int64, float: torch.float64}


def as_tensors(tree: Any, num_models: int) -> Any:
    """An output of tensors ``(B, ...)``. A tensor that all models share is repeated, a number of each is one of B."""
    if isinstance(tree, Stacked):
        return tree.tensor

    def change(leaf: Any) -> Any:
        if isinstance(leaf, ModelValues):
            return leaf.stacked(DTYPES[type(leaf.values[0])], torch.device("cpu")).tensor if leaf.are_numbers else leaf
        return with_model_dim(leaf, num_models) if isinstance(leaf, (Stacked, Tensor)) else leaf

    return pytree.tree_map(change, tree, is_leaf=lambda leaf: isinstance(leaf, Stacked))


def align(values: tuple[Any, ...]) -> list[Any]:
    """Tensors of equal rank that broadcast as in one model: ``(B, C)`` beside ``(B, N, C)`` becomes ``(B, 1, C)``.

    A number of each model, ``(B,)``, is promoted as a number without axes.
    """
    own = [
        value for value in values if isinstance(value, ModelValues) or (isinstance(value, Stacked) and not value.ndim)
    ]
    if own and sum(isinstance(value, (Stacked, Tensor, ModelValues)) for value in values) > 1:
        values = _promoted(values)
    rank = max((value.ndim for value in values if isinstance(value, (Stacked, Tensor))), default=0)
    aligned = []
    for value in values:
        if isinstance(value, Stacked):
            tensor = value.tensor
            missing = rank - value.ndim
            if missing:
                tensor = tensor.reshape(tensor.shape[0], *([1] * missing), *tensor.shape[1:])
            aligned.append(tensor)
        else:
            aligned.append(value)
    return aligned


def _promoted(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers without axes of a type that changes nothing where they stand beside tensors with axes."""
    ranked = [value for value in values if isinstance(value, (Stacked, Tensor))]
    if not ranked:
        return values
    # Types as they are in one model: those with axes among themselves, then those without, then both.
    kinds = [[unwrap(value).dtype for value in ranked if bool(value.ndim) is has_axes] for has_axes in (True, False)]
    among = [reduce(torch.promote_types, own) if own else None for own in kinds]
    probes = [torch.empty(shape, dtype=own, device="meta") for shape, own in zip(((1,), ()), among, strict=True) if own]
    promoted = torch.result_type(probes[0], probes[-1])
    probe = torch.empty(probes[0].shape, dtype=promoted, device="meta")
    device = unwrap(ranked[0]).device
    found: list[Any] = []
    for value in values:
        if isinstance(value, ModelValues):
            value = value.stacked(torch.result_type(probe, value.values[0]), device)
        elif isinstance(value, Stacked) and not value.ndim and (own := value.tensor).dtype != torch.bool:
            changes = among[0] is None or torch.promote_types(among[0], own.dtype) != promoted
            value = Stacked(own.to(promoted)) if changes else value
        found.append(value)
    return tuple(found)


def fold(tensor: Tensor, models_first: bool | None = None) -> tuple[Tensor, bool]:
    """``(B, N, ...)`` to ``(B*N, ...)`` or ``(N*B, ...)``, whichever needs no copy, and whether it is the first."""
    if models_first is None:
        models_first = tensor.stride(0) >= tensor.stride(1)
    return (tensor if models_first else tensor.transpose(0, 1)).flatten(0, 1), models_first


def unfold(tensor: Tensor, num_models: int, models_first: bool) -> Tensor:
    """Undo `fold`: ``(B*N, ...)`` or ``(N*B, ...)`` to ``(B, N, ...)``."""
    if models_first:
        return tensor.unflatten(0, (num_models, -1))
    return tensor.unflatten(0, (-1, num_models)).transpose(0, 1)


def to_channels(tensor: Tensor) -> Tensor:
    """``(B, N, C, ...)`` to ``(N, B*C, ...)``."""
    return tensor.transpose(0, 1).flatten(1, 2)


def from_channels(tensor: Tensor, num_models: int) -> Tensor:
    """``(N, B*C, ...)`` to ``(B, N, C, ...)``, a view."""
    return tensor.unflatten(1, (num_models, -1)).transpose(0, 1)


PLAIN = (bool, int, str, bytes, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def joined(values: Sequence[Any]) -> Any:
    """The constant if all models have the same one, or `Stacked` tensors, or `ModelValues`."""
    if all(is_same(values[0], value) for value in values[1:]):
        return values[0]
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        kinds = {(value.shape, value.dtype, value.device, value.layout) for value in values}
        if len(kinds) == 1 and first.layout is torch.strided:
            with unwatched():
                return Stacked(torch.stack(list(values)))
    return ModelValues(tuple(values))


def is_same(a: Any, b: Any, is_like: Callable[[Any, Any], bool] = lambda *_: False) -> bool:
    """True if two constants are the same to any op. Objects of other types are compared by `is_like`."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(is_same, a, b, repeat(is_like)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key], is_like) for key in a)
    if isinstance(a, slice):
        return is_same((a.start, a.stop, a.step), (b.start, b.stop, b.step), is_like)
    if type(a) is float:
        return a.hex() == b.hex()
    if isinstance(a, Tensor):
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return False
        kinds = [(each.shape, each.dtype, each.device, each.stride(), each.requires_grad) for each in (a, b)]
        is_one_memory = not a.is_meta and a.data_ptr() == b.data_ptr()
        return kinds[0] == kinds[1] and (is_one_memory or torch.equal(a, b) or _are_equal_with_nan(a, b))
    return bool(a == b) if isinstance(a, PLAIN) else is_like(a, b)


def _are_equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
