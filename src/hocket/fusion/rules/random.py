"""Random numbers that a model draws in its forward: each model draws its own.

A draw has no input that differs between the models, so without these rules all models would share one draw.
"""

from __future__ import annotations

from typing import Any

import torch

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, with_model_dim

__all__ = ["DRAWS"]

FROM_SIZE = ("rand", "randn")
LIKE = ("rand_like", "randn_like", "bernoulli", "randint_like")
IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")
DRAWS = frozenset((*FROM_SIZE, *LIKE))  # even where no argument differs between models


@rule(*FROM_SIZE)
def from_size(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """``torch.randn(n, m)``."""
    sizes = kwargs.pop("size") if "size" in kwargs else args[0] if isinstance(args[0], (tuple, list)) else args
    if context.generators:
        own = [context.target(tuple(sizes), **kwargs, generator=each) for each in context.generators]
        return Stacked(torch.stack(own))
    return Stacked(context.target((context.num_models, *sizes), **kwargs))


@rule(*LIKE)
def like(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.randn_like(x)``."""
    tensor = with_model_dim(input, context.num_models)
    if context.generators:
        return NotImplemented
    return Stacked(context.target(tensor, *args, **kwargs))


@rule(*IN_PLACE)
def in_place(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.normal_()``."""
    if not isinstance(input, Stacked):
        return NotImplemented
    if context.generators:
        for own, generator in zip(input.tensor.unbind(0), context.generators, strict=True):
            context.target(own, *args, **kwargs, generator=generator)
    else:
        context.target(input.tensor, *args, **kwargs)
    return input
