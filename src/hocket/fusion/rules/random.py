"""Random numbers that a model draws in its forward: each model draws its own.

A draw has no input that differs between the models, so without these rules all models would share one draw. With seeds,
each model draws what the plain model draws after ``torch.manual_seed(seed)``: its generator takes the place of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.fusion import fallback
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, laid_out, with_model_dim

FROM_SIZE = ("rand", "randn")
LIKE = ("rand_like", "randn_like")
IN_PLACE = (
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_"),
    *("rrelu_", "rrelu_with_noise_"),
)
OTHERS = (
    *("randint", "randint_like", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial", "uniform"),
    *("exponential", "geometric", "log_normal", "cauchy", "_standard_gamma", "_sample_dirichlet", "native_dropout"),
    *("rrelu", "rrelu_with_noise", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "_fused_dropout"),
)
WITH_RATES = (  # in `dropout`, `attention` and `recurrent`
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "scaled_dot_product_attention"),
)
DRAWS = frozenset((*FROM_SIZE, *LIKE, *IN_PLACE, *OTHERS, *WITH_RATES))  # even where no argument differs


def drawing(target: Callable[..., Any], generator: torch.Generator) -> Callable[..., Any]:
    """A function that draws from this generator in place of torch's own for its device."""
    on_cuda, index = generator.device.type == "cuda", generator.device.index or 0

    def draw(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[generator.device] if on_cuda else []):
            usual = torch.cuda.default_generators[index] if on_cuda else torch.default_generator
            usual.set_state(generator.get_state())
            result = target(*args, **kwargs)
            generator.set_state(usual.get_state())
        return result

    return draw


@rule(*OTHERS)
def each(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """Model after model."""
    targets = list(context.targets)
    if context.generators:
        targets = [drawing(target, generator) for target, generator in zip(targets, context.generators, strict=True)]
    return fallback.loop(targets, args, kwargs, context.where)


@rule(*FROM_SIZE)
def from_size(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """``torch.randn(n, m)``."""
    sizes = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
    if context.generators or "generator" in kwargs or not all(isinstance(size, int) for size in sizes):
        return each(context, *args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name != "size"}
    return Stacked(context.target((context.num_models, *sizes), **options))


@rule(*LIKE)
def like(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.randn_like(x)``."""
    if context.generators:
        return each(context, input, *args, **kwargs)
    return Stacked(context.target(with_model_dim(input, context.num_models), *args, **kwargs))


@rule(*IN_PLACE)
def in_place(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.normal_()``."""
    if not isinstance(input, Stacked) or any(
        isinstance(value, (Stacked, Tensor)) for value in (*args, *kwargs.values())
    ):
        return NotImplemented
    if context.generators:
        for own, generator in zip(input.tensor.unbind(0), context.generators, strict=True):
            as_alone = laid_out(own, context.orders)
            drawing(context.target, generator)(as_alone, *args, **kwargs)
            if as_alone is not own:
                own.copy_(as_alone)
    else:
        context.target(input.tensor, *args, **kwargs)
    return input
