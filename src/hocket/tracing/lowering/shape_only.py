"""Ops that look at a tensor's shape, and not at what is in it.

`empty_like(x)` waits for `x` only as long as its shape is not known. In a captured step all shapes are known, so it can
be said without `x`. That matters where much hangs on it: dropout draws its mask into an `empty_like` of its input::

    before   x --> empty_like --> bernoulli_ --> mul      the mask can be drawn only when x is there
    after             empty   --> bernoulli_ --> mul      masks are drawn ahead, beside other ops
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["without_data"]

_aten = torch.ops.aten
_EMPTY = (_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default)
_FILLS = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}


def without_data(func: Any, value: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return a call (function, arguments, keywords) that makes the same result from its shape alone, or None.

    Args:
        func: the op that was called.
        value: its result, of which shape, strides and dtype matter.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return None
    size, kwargs = list(value.shape), {"dtype": value.dtype, "device": value.device}
    if func in _EMPTY:
        return _aten.empty_strided.default, (size, list(value.stride())), kwargs
    if func in _FILLS and value.is_contiguous():
        return _aten.full.default, (size, _FILLS[func]), kwargs
    return None
