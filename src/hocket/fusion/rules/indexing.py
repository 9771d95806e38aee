"""Indexing: ``x[:, 0]`` of one model is ``x[:, :, 0]`` of all. Indices that are tensors fall back to vmap."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.shape import shifted
from hocket.fusion.stacked import Stacked, is_stacked, with_model_dim


@rule("getitem")
def getitem(context: OpContext, input: Any, index: Any) -> Any:
    """Slices, numbers, None and Ellipsis; of a tuple, its item."""
    if not isinstance(input, Stacked):
        return NotImplemented if is_stacked(index) else input[index]
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (Stacked, Tensor, list)) for part in parts):
        return NotImplemented
    return Stacked(input.tensor[(slice(None), *parts)])


@rule("setitem")
def setitem(context: OpContext, input: Any, index: Any, value: Any) -> Any:
    """Write into a part of a value, in place."""
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(input, Stacked) or any(isinstance(part, (Stacked, Tensor, list)) for part in parts):
        return NotImplemented
    target = input.tensor[(slice(None), *parts)]
    if isinstance(value, Stacked):
        missing = target.ndim - value.tensor.ndim
        target.copy_(value.tensor.reshape(context.num_models, *([1] * missing), *value.shape))
    elif isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(value)
    return None


@rule("gather", "take_along_dim")
def gather(context: OpContext, input: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Elements along one axis, by an index of the same rank."""
    if not isinstance(dim, int):
        return NotImplemented
    return Stacked(
        context.target(
            with_model_dim(input, context.num_models), shifted(dim), with_model_dim(index, context.num_models), **kwargs
        )
    )


@rule("index_select")
def index_select(context: OpContext, input: Any, dim: int, index: Any) -> Any:
    """Rows by a shared index."""
    if isinstance(index, Stacked):
        return NotImplemented
    return Stacked(context.target(input.tensor, shifted(dim), index))
