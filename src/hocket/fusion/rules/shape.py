"""Ops that rely on the models' layout: what goes side by side, and what treats every example of a batch alike.

cat(x, y)             in the layout of the first one
max_pool2d(x)         models and examples become one axis, in the order that they have in memory
as_strided(x)         one model's elements side by side, as a recorder has found them
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.fusion.known_functions import strides
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, fold, is_stacked, map_tree, unfold, with_model_dim

POOLS = [
    f"{kind}{rank}d"
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for rank in (1, 2, 3)
]
OF_AUTOGRAD = [*(f"{name}_with_indices" for name in POOLS if "max" in name), *(f"_{name}" for name in POOLS)]
UNPOOLS = ("max_unpool1d", "max_unpool2d", "max_unpool3d")


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


@rule(
    *("interpolate", "upsample", "upsample_nearest2d", "upsample_bilinear2d", "_upsample_nearest_exact2d"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "local_response_norm"),
    *("unfold", "im2col", "fold", "col2im", "upsample_nearest1d", "upsample_nearest3d", "upsample_bicubic2d"),
    *("upsample_trilinear3d", "upsample_linear1d", "boolean_dispatch", *POOLS, *OF_AUTOGRAD, *UNPOOLS),
)
def per_example(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """An op that treats every example of a batch ``(N, C, ...)`` alike, with indices where asked for."""
    name, num_models = context.name, context.num_models
    rank = re.search(r"\dd", name)
    is_batch = input.ndim >= 3 if rank is None or name in UNPOOLS else input.ndim == int(rank[0][0]) + 2
    if name == "unfold" and context.target is not functional.unfold:  # along one axis
        return NotImplemented
    places = args[:1] if name in UNPOOLS else ()
    if not is_batch or is_stacked((args[len(places) :], kwargs)):
        return NotImplemented
    folded, models_first = fold(with_model_dim(input, num_models))
    indices = [fold(with_model_dim(each, num_models), models_first)[0] for each in places]
    result = context.target(folded, *indices, *args[len(places) :], **kwargs)
    return map_tree(
        result, lambda each: Stacked(unfold(each, num_models, models_first)) if isinstance(each, Tensor) else each
    )


@rule("select_scatter")
def select_scatter(context: OpContext, input: Any, src: Any, dim: int, index: int) -> Any:
    """One axis further: under torch's batching (2.13), the gradient of `src` is wrong."""
    own = [with_model_dim(tensor, context.num_models) for tensor in (input, src)]
    return Stacked(context.target(*own, dim % input.ndim + 1, index))


@rule("as_strided", "as_strided_copy", "as_strided_scatter")
def as_strided(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Strides within one model's memory, see `hocket.fusion.known_functions`, and from model to model."""
    x = with_model_dim(input, context.num_models).contiguous()
    is_scatter = context.name == "as_strided_scatter" and "src" not in kwargs
    sources = (*args[:is_scatter], *(kwargs[name] for name in kwargs if name == "src"))
    size, stride, first = strides(*args[is_scatter:], **kwargs)
    own = [with_model_dim(source, context.num_models) for source in sources]
    return Stacked(context.target(x, *own, (len(x), *size), (x[0].numel(), *stride), first))


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def pad(context: OpContext, input: Any, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Padding counts from the last axis, so constant padding needs no change. Other modes take models for images."""
    mode = kwargs.get("mode", args[0] if args and isinstance(args[0], str) else "constant")
    if mode == "constant" and context.name in ("pad", "constant_pad_nd"):
        return Stacked(context.target(input.tensor, pad, *args, **kwargs))
    return per_example(context, input, pad, *args, **kwargs) if input.ndim == len(pad) // 2 + 2 else NotImplemented
