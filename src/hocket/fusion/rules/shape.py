"""Ops that only name axes: the same op, each axis moved one to the right.

flatten(x, 1)  ->  flatten(x, 2)          softmax(x, -1)  ->  softmax(x, -1)
view(x, N, -1) ->  view(x, B, N, -1)      permute(x, 0, 2, 1)  ->  permute(x, 0, 1, 3, 2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, fold, is_stacked, map_tree, unfold, with_model_dim

__all__ = ["shifted"]

# name -> the positions of its axes among the arguments, with their keywords and defaults (None: must be given)
AXES: dict[str, tuple[tuple[int, str, Any], ...]] = {
    "softmax": ((1, "dim", None),),
    "_softmax": ((1, "dim", None),),
    "log_softmax": ((1, "dim", None),),
    "softmin": ((1, "dim", None),),
    "cumsum": ((1, "dim", None),),
    "cumprod": ((1, "dim", None),),
    "logcumsumexp": ((1, "dim", None),),
    "transpose": ((1, "dim0", None), (2, "dim1", None)),
    "swapaxes": ((1, "axis0", None), (2, "axis1", None)),
    "swapdims": ((1, "dim0", None), (2, "dim1", None)),
    "flatten": ((1, "start_dim", 0), (2, "end_dim", -1)),
    "unflatten": ((1, "dim", None),),
    "unsqueeze": ((1, "dim", None),),
    "chunk": ((2, "dim", 0),),
    "tensor_split": ((2, "dim", 0),),
    "split": ((2, "dim", 0),),
    "split_with_sizes": ((2, "dim", 0),),
    "unbind": ((1, "dim", 0),),
    "select": ((1, "dim", None),),
    "narrow": ((1, "dim", None),),
    "slice": ((1, "dim", 0),),
    "flip": ((1, "dims", None),),
    "movedim": ((1, "source", None), (2, "destination", None)),
    "repeat_interleave": ((2, "dim", None),),
    "diagonal": ((2, "dim1", 0), (3, "dim2", 1)),
    "sort": ((1, "dim", -1),),
    "argsort": ((1, "dim", -1),),
    "topk": ((2, "dim", -1),),
    "normalize": ((2, "dim", 1),),
}


def shifted(axes: Any) -> Any:
    """An axis, or several, where the models' axis stands first."""
    if isinstance(axes, (tuple, list)):
        return type(axes)(shifted(axis) for axis in axes)
    return axes + 1 if axes >= 0 else axes


@rule(*AXES)
def axis_op(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Any op in `AXES`."""
    if input.ndim == 0:  # its axis -1 would be the models'
        return NotImplemented
    if context.name == "flip" and len(args) > 1:  # x.flip(3, 2)
        args = (args,)
    positional = [input.tensor, *args]
    for position, keyword, default in AXES[context.name]:
        if position < len(positional):
            positional[position] = shifted(positional[position])
        elif keyword in kwargs or default is not None:
            kwargs = {**kwargs, keyword: shifted(kwargs.get(keyword, default))}
        else:
            return NotImplemented
    if is_stacked((positional[1:], kwargs)):
        return NotImplemented
    return wrapped(_called(context, positional, kwargs))


def _called(context: OpContext, positional: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the op; where it takes an axis by position only, put it there."""
    try:
        return context.target(*positional, **kwargs)
    except TypeError:
        return context.target(*positional, *kwargs.values())


def wrapped(result: Any) -> Any:
    """Tensors in a result, stacked; a named tuple (of ``sort`` or ``max``) stays one."""
    return map_tree(result, lambda value: Stacked(value) if isinstance(value, Tensor) else value)


def _sizes(first: Any, rest: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(first) if isinstance(first, (tuple, list)) else (first, *rest)


@rule("view", "reshape", "_unsafe_view", "unsafe_view")
def view(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """A model's own shape, behind the models' axis."""
    if kwargs or isinstance(args[0], torch.dtype):
        return NotImplemented
    sizes = _sizes(args[0], args[1:])
    return Stacked(input.tensor.reshape(context.num_models, *sizes))


@rule("view_as", "reshape_as")
def view_as(context: OpContext, input: Any, other: Any) -> Any:
    """The shape of another value of the same model."""
    return Stacked(with_model_dim(input, context.num_models).reshape(context.num_models, *other.shape))


@rule("expand")
def expand(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat without a copy; new axes go between the models' axis and the value's own."""
    sizes = _sizes(kwargs["size"] if "size" in kwargs else args[0], args[1:])
    tensor = input.tensor
    missing = len(sizes) - input.ndim
    tensor = tensor.reshape(context.num_models, *([1] * missing), *tensor.shape[1:])
    return Stacked(tensor.expand(context.num_models, *sizes))


@rule("expand_as")
def expand_as(context: OpContext, input: Any, other: Any) -> Any:
    """Repeat to the shape of another value."""
    return expand(context, input, tuple(other.shape)) if isinstance(input, Stacked) else NotImplemented


@rule("repeat", "tile")
def repeat(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat with a copy."""
    if kwargs:
        return NotImplemented
    times = _sizes(args[0], args[1:])
    missing = len(times) - input.ndim
    if missing < 0:
        return NotImplemented
    tensor = input.tensor.reshape(context.num_models, *([1] * missing), *input.tensor.shape[1:])
    return Stacked(tensor.repeat(1, *times))


@rule("permute")
def permute(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Axes in another order."""
    axes = _sizes(kwargs["dims"] if "dims" in kwargs else args[0], args[1:])
    rank = input.ndim
    return Stacked(input.tensor.permute(0, *(axis % rank + 1 for axis in axes)))


@rule("t")
def t(context: OpContext, input: Any) -> Any:
    """A matrix, transposed; a vector as it is."""
    return Stacked(input.tensor.transpose(1, 2)) if input.ndim == 2 else input


@rule("squeeze")
def squeeze(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Without axes of length one, but never without the models' axis."""
    axes = kwargs.get("dim", args[0] if args else None)
    if axes is None:
        axes = tuple(axis for axis, length in enumerate(input.shape) if length == 1)
    return Stacked(input.tensor.squeeze(shifted(axes if isinstance(axes, int) else tuple(axes))))


@rule("ravel")
def ravel(context: OpContext, input: Any) -> Any:
    """All elements of one model."""
    return Stacked(input.tensor.flatten(1))


@rule("cat", "concat", "concatenate", "stack")
def cat(context: OpContext, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Values side by side. In the layout of the first one, so that a chain of convolutions copies nothing more."""
    if "axis" in kwargs:
        dim = kwargs.pop("axis")
    if kwargs:
        return NotImplemented
    stacked = [with_model_dim(tensor, context.num_models) for tensor in tensors]
    first = next(tensor.tensor for tensor in tensors if isinstance(tensor, Stacked))
    is_old_empty = [tensor.ndim == 2 and tensor.shape[1] == 0 for tensor in stacked]
    stacked = [tensor for tensor, empty in zip(stacked, is_old_empty, strict=True) if not empty or first.ndim == 2]
    new_axis = context.name == "stack"
    rank = first.ndim - 1 + new_axis
    dim = dim % rank
    batch_outside = first.ndim > 2 and first.stride(0) < first.stride(1) and dim > 0
    if not batch_outside:
        return Stacked(context.target(stacked, dim + 1))
    return Stacked(context.target([tensor.transpose(0, 1) for tensor in stacked], dim + 1).transpose(0, 1))


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def pad(context: OpContext, input: Any, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Padding counts from the last axis, so a constant one needs no change; others treat the models as images."""
    tensor = input.tensor
    mode = kwargs.get("mode", args[0] if args and isinstance(args[0], str) else "constant")
    if mode == "constant" and context.name in ("pad", "constant_pad_nd"):
        return Stacked(context.target(tensor, pad, *args, **kwargs))
    spatial = len(pad) // 2
    if input.ndim != spatial + 2:
        return NotImplemented
    folded, models_first = fold(tensor)
    return Stacked(unfold(context.target(folded, pad, *args, **kwargs), context.num_models, models_first))


@rule(
    *("interpolate", "upsample", "upsample_nearest2d", "upsample_bilinear2d", "_upsample_nearest_exact2d"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "local_response_norm"),
    *("unfold", "im2col", "fold", "col2im", "upsample_nearest1d", "upsample_nearest3d", "upsample_bicubic2d"),
    *("upsample_trilinear3d", "upsample_linear1d"),
)
def per_example(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """What treats every example of a batch ``(N, C, ...)`` alike: models and examples become one axis."""
    if input.ndim < 3 or is_stacked((args, kwargs)):
        return NotImplemented
    if context.name == "unfold" and context.target is not functional.unfold:  # along one axis
        return NotImplemented
    folded, models_first = fold(input.tensor)
    return Stacked(unfold(context.target(folded, *args, **kwargs), context.num_models, models_first))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """A new tensor like one of the model's, the same in all models until one is written to."""
    made = context.target(input.tensor, *args, **kwargs)
    return Stacked(made.unsqueeze(0).repeat(context.num_models, *([1] * made.ndim)))
