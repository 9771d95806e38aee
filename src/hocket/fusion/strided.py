"""Views by strides, which count elements of memory: of a model's own, where the model runs alone.

x.as_strided((2, 2), (1, 1))          within a contiguous x: the same places in each model's part
h.t().as_strided((2, 2), (1, 1))      as x lies in memory, where fused models may have another order
w.as_strided((2, 2), (1, 1), 1)       from the beginning of the memory, where other models' weights are
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from hocket.errors import InputError

__all__ = ["STRIDED", "memory", "strides", "unlike_alone"]

STRIDED = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))


def memory(tensor: Tensor) -> tuple[int, int] | None:
    """The storage of a tensor and the place in it, or None if it has none."""
    if not torch._C._has_storage(tensor):
        return None
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def strides(
    size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, **_: Any
) -> tuple[Sequence[int], Sequence[int], int | None]:
    """The arguments of an op of `STRIDED` behind its tensors."""
    return size, stride, storage_offset


def unlike_alone(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_common: Set[Any]) -> bool:
    """True if an op of `STRIDED` may reach elements outside of a contiguous tensor.

    Raises:
        InputError: it counts from the beginning of a memory `in_common` with other models.
    """
    tensor = args[0]
    size, stride, first = strides(*args[1 + (name == "as_strided_scatter" and "src" not in kwargs) :], **kwargs)
    found = memory(tensor)
    begin = 0 if found is None else found[1]
    if found is not None and begin > 0 and first not in (None, begin) and found[0] in in_common:
        raise InputError(
            f"{name}: storage_offset: counts from the beginning of a memory that fused models have in common; clone "
            "the tensor before, or leave it out"
        )
    last = (first or 0) + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    is_counted = first is None or begin == 0
    return name == "as_strided_" or not (is_counted and tensor.is_contiguous() and last < tensor.numel())
