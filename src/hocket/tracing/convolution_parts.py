"""Convolutions in float64, some images at a time.

In float64 torch has no kernels of oneDNN: it writes the images of a whole batch out as the columns of one matrix, nine
times their size for a kernel of 3 x 3, and that is what a step in float64 would need most of its memory for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
# What the columns of some images may be together.
MAX_COLUMNS_BYTES = 16 * 2**20


def convolution_in_parts(func: Any) -> Callable[..., Any] | None:
    """Return a function that computes this ATen op some images at a time, or None if it is not a convolution.

    The function has the arguments, the result and the layout of the op. Sums over images are added in another order.

    Example:
        >>> convolution_in_parts(torch.ops.aten.relu.default) is None
        True
    """
    return _IN_PARTS.get(func)


def _forward(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    result: Any = None
    for begin, size in _parts(x, weight):
        made = _aten.convolution.default(x.narrow(0, begin, size), weight, bias, *options)
        if size == len(x):
            return made
        result = _put(result, made, begin, len(x))
    return result


def _backward(gradient: Any, x: Any, weight: Any, *options: Any) -> Any:
    mask = options[-1]
    images: Any = None
    sums: list[Any] = [None, None]
    for begin, size in _parts(x, weight):
        parts = (each.narrow(0, begin, size) for each in (gradient, x))
        made, *further = _aten.convolution_backward.default(*parts, weight, *options)
        if size == len(x):
            return made, *further
        images = _put(images, made, begin, len(x)) if mask[0] else made
        sums = [new if old is None or new is None else old.add_(new) for old, new in zip(sums, further, strict=True)]
    return images, *sums


_IN_PARTS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}


def _parts(x: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    """Where parts of a batch begin, and how many images they have."""
    num_images = len(x) if x.dim() == weight.dim() else 1
    if x.dtype is not torch.float64 or num_images < 2:
        return [(0, len(x))]
    # Of a strided convolution the columns are fewer, of a transposed one as many as its input has places.
    columns_bytes = x.element_size() * math.prod(weight.shape[2:]) * x[0].numel()
    size = max(1, MAX_COLUMNS_BYTES // max(1, columns_bytes))
    return [(begin, min(size, num_images - begin)) for begin in range(0, num_images, size)]


def _put(whole: Any, part: torch.Tensor, begin: int, num_images: int) -> torch.Tensor:
    """A part of a batch put into the whole one, which is made for the first part, with its strides."""
    if whole is None:
        shape = (num_images, *part.shape[1:])
        strides = (math.prod(part.shape[1:]), *part.stride()[1:])
        whole = torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)
    whole.narrow(0, begin, len(part)).copy_(part)
    return whole
