"""Pooling: every example and channel by itself, so models and examples become one axis."""

from __future__ import annotations

from typing import Any

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.shape import wrapped
from hocket.fusion.stacked import Stacked, fold, is_stacked, unfold, with_model_dim

KINDS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
NAMES = tuple(f"{kind}{rank}d" for kind in KINDS for rank in (1, 2, 3))
WITH_INDICES = (
    *(f"{name}_with_indices" for name in NAMES if "max" in name),
    *("boolean_dispatch", "_max_pool1d", "_max_pool2d", "_max_pool3d"),
)


@rule(*NAMES, *WITH_INDICES, *(f"_{name}" for name in NAMES if "adaptive" in name))
def pool(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``(N, C, ...)``, with indices where they are asked for."""
    name = context.name
    rank = next((int(digit) for digit in reversed(name) if digit.isdigit()), input.ndim - 2)
    if input.ndim != rank + 2 or is_stacked((args, kwargs)):
        return NotImplemented
    folded, models_first = fold(input.tensor)
    result = context.target(folded, *args, **kwargs)
    if isinstance(result, tuple):
        return tuple(Stacked(unfold(each, context.num_models, models_first)) for each in result)
    return wrapped(unfold(result, context.num_models, models_first))


@rule("max_unpool1d", "max_unpool2d", "max_unpool3d")
def max_unpool(context: OpContext, input: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Values back to where they were largest."""
    if input.ndim < 3:
        return NotImplemented
    values, places = (
        with_model_dim(input, context.num_models).flatten(0, 1),
        with_model_dim(indices, context.num_models).flatten(0, 1),
    )
    return Stacked(context.target(values, places, *args, **kwargs).unflatten(0, (context.num_models, -1)))
