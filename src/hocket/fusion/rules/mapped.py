"""Ops that torch's own batching computes for all models at once, on the layout that it finds.

transpose(x, 0, 1)  ->  transpose of what stands behind the models' axis, a view again

On an op of (8, 4, 16, 32) elements that takes 6 us, as long as a rule in Python that moves the axes itself. Under
autocast, torch's batching decomposes an op before autocast has seen it, so ops that autocast knows then go model by
model. An op that torch has no batching for belongs elsewhere: it would run model by model, slowly, with a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.predispatch import lazy_load_decompositions

from hocket.fusion import fallback
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, unwrap, with_model_dim

# Autocast looks at none of these.
ANY_TYPE = (
    "transpose", "swapaxes", "swapdims", "movedim", "permute", "t", "flatten", "unflatten", "ravel", "unsqueeze",
    "squeeze", "chunk", "tensor_split", "split", "split_with_sizes", "unbind", "select", "narrow", "slice", "flip",
    "diagonal", "expand", "expand_as", "broadcast_tensors", "repeat", "tile", "repeat_interleave", "view_as",
    "reshape_as", "reshape", "sort", "argsort", "topk", "gather", "take_along_dim", "index_select", "glu",
    "logcumsumexp", "mean", "amax", "amin", "std", "var", "nansum", "nanmean", "any", "all", "argmax", "argmin",
    "median", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "triu", "tril",
)  # fmt: skip
OTHERS = frozenset(
    (
        "addmm", "baddbmm", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
        "cross_entropy", "cross_entropy_loss",
    )
)  # fmt: skip


@rule(*ANY_TYPE, *OTHERS)
def mapped(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """Any op of `ANY_TYPE` and `OTHERS`."""
    if context.name in OTHERS:
        if torch._C._is_any_autocast_enabled() or fallback.are_mixed((*args, *kwargs.values())):
            return fallback.loop(context.targets, args, kwargs, context.where)
        lazy_load_decompositions()  # of losses
    if context.name == "repeat_interleave" and any(isinstance(each, (Stacked, Tensor)) for each in args[1:]):
        return NotImplemented
    target = Tensor.reshape_as if context.name == "view_as" else context.target  # elsewhere in memory it is no view
    try:
        return fallback.batched(target, args, kwargs, context.num_models)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):
        return NotImplemented  # if it is the model's mistake, one model alone says it best


@rule("cumprod_", "float_power_", "index_reduce_")
def beside(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes whose gradients need the result, over which torch's batching would write once more."""
    targets = (getattr(Tensor, context.name[:-1]),) * context.num_models
    own = (Stacked(input.tensor.clone()), *args)
    input.tensor.copy_(fallback.loop(targets, own, kwargs, context.where).tensor)
    return input


@rule("view", "_unsafe_view", "unsafe_view")
def view(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """A view with a model's own shape, or a copy where the memory layout allows no view, see `hocket.fusion.writes`."""
    if kwargs or isinstance(args[0], torch.dtype):
        return NotImplemented
    sizes = args[0] if isinstance(args[0], (tuple, list)) else args
    return Stacked(input.tensor.reshape(context.num_models, *sizes))


@rule("getitem", "setitem")
def item(context: OpContext, input: Any, index: Any, *value: Any) -> Any:
    """Index by slices, numbers, None and Ellipsis, or take the item of a tuple. Other tensors are left to `vmap`."""
    places = index if isinstance(index, tuple) else (index,)
    if value and isinstance(index, (Stacked, Tensor)) and _fills(input, unwrap(index), *value):
        own = with_model_dim(index, context.num_models)
        input.tensor.masked_fill_(own.reshape(*own.shape, *(1,) * (input.tensor.ndim - own.ndim)), *value)
        return None
    if any(isinstance(place, (Stacked, Tensor, list)) for place in places):
        return NotImplemented
    return input[index] if isinstance(input, (tuple, list)) else mapped(context, input, index, *value)


def _fills(input: Any, mask: Tensor, value: Any) -> bool:
    """True of ``x[mask] = 0.1``, whose result has no shape of its own."""
    return isinstance(input, Stacked) and mask.dtype == torch.bool and isinstance(value, (bool, int, float))


@rule("getattr")
def attribute(context: OpContext, input: Any, name: str) -> Any:
    """``x.T``, ``x.mT``, ``x.real``, ``x.imag``, ``x.data``: attributes that are tensors."""
    return Stacked(input.tensor.data) if name == "data" else mapped(context, input, name)
