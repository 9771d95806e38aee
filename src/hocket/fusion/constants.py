"""Constants of B models: whether they are the same, and how they stand for all models where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.fusion.stacked import ModelValues, Stacked, unwatched

__all__ = ["is_same", "joined"]

PLAIN = (bool, int, str, bytes, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def joined(values: Sequence[Any]) -> Any:
    """One constant where all models have the same one; else `Stacked` tensors, else `ModelValues`."""
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
    """Whether two constants are the same to any op; other objects of one type are if `is_like` says so."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(is_same(one, other, is_like) for one, other in zip(a, b, strict=True))
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
        return kinds[0] == kinds[1] and (_is_one_memory(a, b) or torch.equal(a, b) or _are_equal_with_nan(a, b))
    return bool(a == b) if isinstance(a, PLAIN) else is_like(a, b)


def _is_one_memory(a: Tensor, b: Tensor) -> bool:
    return not a.is_meta and a.data_ptr() == b.data_ptr()


def _are_equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
