"""Convolutions of 3 x 3 with stride 1, and of 4 x 4 with stride 2, by Winograd's algorithm, for channels-last images.

A tile of 2 x 2 results takes 16 products for each pair of channels instead of 36, and with filters of 4 x 4 it takes 36
instead of 64 (Lavin & Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.1, see
`native/winograd.cpp`). The forward, the gradient of the input and that of the filters are an op each, and the
gradient of a bias is a sum. A transposed convolution is the gradient of the input of another one. These ops round
differently from torch's, so only forms that need not be bitwise have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.tracing.lowering.calls import AnnotatedCall, StepCalls
from hocket.tracing.lowering.passes import PARTS
from hocket.tracing.program import Call, Slot

_aten = torch.ops.aten

# Filters are transformed in each call, which takes as long as the products of some 30 tiles. Measured with two threads:
# 32 tiles of 512 channels 0.95 of torch's speed, 64 tiles of 64 channels 1.2 to 1.6, 98 of 512 channels 1.4 to 1.6.
_MIN_TILES = 64
# Channels of a convolution, input and output: with fewer, most of a vector would be zeros.
_MIN_CHANNELS = 8
# Vectors of every second pixel end with it: channels fill them.
_LANES = 16
_DEVICES = ("cpu", "meta")  # values of a compiled listing, which is for the CPU, are known without data


def tiles_filters(shape: Sequence[int], stride: int | None = None) -> bool:
    """Return True if there is a convolution by Winograd's algorithm for filters of this shape and this stride.

    Example:
        >>> tiles_filters((16, 8, 3, 3)), tiles_filters((16, 8, 4, 4)), tiles_filters((64, 32, 4, 4), stride=1)
        (True, False, False)
    """
    *channels, rows, columns = shape
    if (rows, columns) == (3, 3):
        return stride in (1, None) and min(channels) >= _MIN_CHANNELS
    return (rows, columns) == (4, 4) and stride in (2, None) and not any(each % _LANES for each in channels)


def tile_convolutions(step: StepCalls) -> list[AnnotatedCall]:
    """Put the native ops in place of the convolutions that they can make, and of their backward as it was captured."""
    tiled: list[AnnotatedCall] = []
    for piece in step.pieces:
        if piece.call.func is _aten.convolution.default:
            tiled.append(_forward(piece, step))
        elif piece.call.func is _aten.convolution_backward.default:
            tiled += _backward(piece, step)
        else:
            tiled.append(piece)
    return _without_copies(StepCalls(tiled, step.values, step.roots, step.kept))


def _without_copies(step: StepCalls) -> list[AnnotatedCall]:
    """Gradients of filters are made in the layout that the parameter has, where a copy would bring them into it."""
    pieces, roots, touching = step.pieces, step.roots, step.touching
    result: list[AnnotatedCall | None] = list(pieces)
    for position, piece in enumerate(pieces):
        if piece.call.func is not _op("weight_gradient"):
            continue
        (slot,) = piece.call.outs.values()
        users = touching[roots[slot]]
        if len(users) != 2 or slot in step.kept:
            continue
        copy = pieces[users[-1]].call
        if copy.func is not _aten.copy_.default or copy.args[1:] != (Slot(slot),):
            continue
        into = copy.args[0].index
        empty, *others = touching[roots[into]]
        is_fresh = pieces[empty].call.func is _aten.empty_strided.default and others[:1] == [users[-1]]
        found = step.values[into]
        is_last = not found.is_contiguous()
        if is_fresh and found.dtype == torch.float32 and (not is_last or _has_channels_last(found)):
            call = replace(piece.call, args=(*piece.call.args[:-1], is_last), outs={None: into})
            result[position] = piece.made_by(call, roots)
            result[empty] = result[users[-1]] = None
    return [piece for piece in result if piece is not None]


def _forward(piece: AnnotatedCall, step: StepCalls) -> AnnotatedCall:
    values = step.values
    x, weight, bias, *options = piece.call.args
    (made,) = piece.call.outs.values()
    large, small = (Slot(made), x) if _is_transposed(options) else (x, Slot(made))
    can_tile = _can_tile(values, large, small, weight, options) and _have_channels_last(values, x, Slot(made))
    if not can_tile or not _is_large(values[small.index]):
        return piece
    func = "input_gradient" if _is_transposed(options) else "convolution"
    return piece.made_by(Call(_op(func), (x, weight, bias, tuple(options[1])), {}, piece.call.outs), step.roots)


def _backward(piece: AnnotatedCall, step: StepCalls) -> Iterator[AnnotatedCall]:
    values = step.values
    gradient, x, weight, _, *options, _ = piece.call.args
    outs = {position: slot for position, slot in piece.call.outs.items() if position is not None}
    large, small = (gradient, x) if _is_transposed(options) else (x, gradient)
    is_last = 1 in outs and _has_channels_last(values[outs[1]])
    is_usual = 1 not in outs or is_last or values[outs[1]].is_contiguous()
    own = Slot(outs[0]) if 0 in outs else x
    can_tile = is_usual and _can_tile(values, large, small, weight, options) and _have_channels_last(values, x, own)
    if not can_tile or not (_is_large(values[small.index]) or 0 not in outs):
        yield piece
        return
    padding, taps = tuple(options[1]), values[weight.index].shape[-1]
    calls = {
        0: (_op("convolution" if _is_transposed(options) else "input_gradient"), (gradient, weight, None, padding)),
        1: (_op("weight_gradient"), (small, large, padding, taps, is_last)),
        2: (_aten.sum.dim_IntList, (gradient, (0, 2, 3))),
    }
    for position, slot in sorted(outs.items()):
        func, args = calls[position]
        share = 0.0 if position == 2 else piece.flops / max(1, sum(each < 2 for each in outs))
        made = replace(piece, part=PARTS[position], flops=share)
        yield made.made_by(Call(func, args, {}, {None: slot}), step.roots)


def _op(name: str) -> Any:
    return getattr(torch.ops.hocket, f"winograd_{name}").default


def _is_transposed(options: Sequence[Any]) -> bool:
    return bool(options[3])


def _can_tile(values: Mapping[int, Any], x: Any, y: Any, weight: Any, options: Sequence[Any]) -> bool:
    """Return True for a convolution of these filters from x to y, or a transposed one from y to x, as in a layer."""
    stride, padding, dilation, _, more, groups = options
    found: list[Any] = [values.get(slot.index) if isinstance(slot, Slot) else None for slot in (x, y, weight)]
    if any(v is None or v.dim() != 4 or v.dtype != torch.float32 or v.device.type not in _DEVICES for v in found):
        return False
    *images, filters = found
    taps, (step, *others) = filters.shape[-1], stride
    usual = set(others) <= {step} and set(dilation) == {1} and not any(more) and groups == 1
    if not usual or not tiles_filters(filters.shape, step) or len(padding) != 2 or max(padding) > 2:
        return False
    # One with a row that no filter reads has another shape than the gradient of an input that is made of y.
    return all(
        large + 2 * pad == step * (small - 1) + taps
        for large, small, pad in zip(*(image.shape[2:] for image in images), padding, strict=True)
    )


def _have_channels_last(values: Mapping[int, Any], *images: Slot) -> bool:
    return all(_has_channels_last(values[image.index]) for image in images)


def _has_channels_last(value: Any) -> bool:
    found: bool = value.is_contiguous(memory_format=torch.channels_last)
    return found


def _is_large(result: Any) -> bool:
    images, _, height, width = result.shape
    return images * ((height + 1) // 2) * ((width + 1) // 2) >= _MIN_TILES
