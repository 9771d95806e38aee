"""Normalisation. Statistics are per channel, so the models' channels side by side keep their statistics apart.

batch norm      (N, B*C, ...)   weights, running statistics (B, C) seen as (B*C)
instance norm   the same
group norm      (N, B*C, ...)   with B*G groups
layer norm      over the last axes, then each model's own scale and shift
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.errors import InputError
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, from_channels, to_channels, with_model_dim


def _flat(value: Any, num_models: int) -> Tensor | None:
    if value is None:
        return None
    return value.tensor.reshape(-1) if isinstance(value, Stacked) else value.repeat(num_models)


def _is_flat(statistic: Any) -> bool:
    """True if what is written into running statistics as ``(B*C)`` is written where it belongs."""
    return statistic is None or (isinstance(statistic, Stacked) and statistic.tensor.is_contiguous())


STATE = ("running_mean", "running_var", "weight", "bias")
BATCH = ("training", "momentum", "eps")
INSTANCE = ("use_input_stats", "momentum", "eps")


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], is_functional: bool, options: Sequence[str]) -> Any:
    """The state and the options of a norm. Functions have the statistics first, ops of aten the weights."""
    names = (*(STATE if is_functional else (*STATE[2:], *STATE[:2])), *options)
    given = {"momentum": 0.1, "eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in STATE], [given.get(name, options is INSTANCE) for name in options]


@rule("batch_norm")
def batch_norm(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """With the running mean and variance, weight and bias of each model."""
    state, options = _given(args, kwargs, context.target is functional.batch_norm, BATCH)
    x, num_models = with_model_dim(input, context.num_models), context.num_models
    if x.ndim < 3 or not all(map(_is_flat, state[:2])):
        return NotImplemented
    flat: Any = [_flat(value, num_models) for value in state]
    swapped = x.transpose(1, 2)
    if x.ndim > 3 and swapped.is_contiguous() and not x.is_contiguous():  # (B, C, N, ...): one example, B*C channels
        if options[0] and swapped[0, 0].numel() == 1:  # torch's own check is of all models
            raise InputError(f"{context.where}: expected more than one value per channel when training")
        one = swapped.reshape(1, x.shape[0] * x.shape[2], -1)
        y = functional.batch_norm(one, *flat, *options)
        return Stacked(y.view(swapped.shape).transpose(1, 2))
    return Stacked(from_channels(functional.batch_norm(to_channels(x), *flat, *options), num_models))


@rule("instance_norm")
def instance_norm(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Every example and channel by itself. Running statistics, where kept, are per model."""
    state, options = _given(args, kwargs, context.target is functional.instance_norm, INSTANCE)
    if input.ndim < 3 or not all(map(_is_flat, state[:2])):
        return NotImplemented
    flat: Any = [_flat(value, context.num_models) for value in state]
    together = to_channels(with_model_dim(input, context.num_models))
    return Stacked(from_channels(functional.instance_norm(together, *flat, *options), context.num_models))


@rule("group_norm")
def group_norm(
    context: OpContext, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """B models with G groups are one with B*G groups."""
    if input.ndim < 2:
        return NotImplemented
    num_models = context.num_models
    flat = _flat(weight, num_models), _flat(bias, num_models)
    together = to_channels(with_model_dim(input, num_models))
    y = functional.group_norm(together, num_models * num_groups, *flat, eps)
    return Stacked(from_channels(y, num_models))


@rule("layer_norm")
def layer_norm(
    context: OpContext,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """The last axes of every example, then a scale and a shift per model."""
    shape = tuple(normalized_shape)
    x = with_model_dim(input, context.num_models)
    y = functional.layer_norm(x, shape, None, None, eps)
    return Stacked(_scaled(context, y, weight, bias, len(shape)).to(y.dtype))  # weights are wider under autocast


@rule("rms_norm")
def rms_norm(
    context: OpContext, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """The last axes of every example, then a scale per model."""
    shape = tuple(normalized_shape)
    y = functional.rms_norm(with_model_dim(input, context.num_models), shape, None, eps)
    return Stacked(_scaled(context, y, weight, None, len(shape)))


@rule("_weight_norm")
def weight_norm(context: OpContext, v: Any, g: Any, dim: int = 0) -> Any:
    """Rows of ``(O, ...)``, each of a length of its own: rows of all models are rows of one weight."""
    if dim != 0 or not isinstance(v, Stacked) or not isinstance(g, Stacked):
        return NotImplemented
    return Stacked(context.target(v.tensor.flatten(0, 1), g.tensor.flatten(0, 1), 0).unflatten(0, (len(v.tensor), -1)))


def _scaled(context: OpContext, y: Tensor, weight: Any, bias: Any, rank: int) -> Tensor:
    """Weights ``(B, *normalized_shape)`` against ``(B, ..., *normalized_shape)``."""

    def spread(value: Any) -> Tensor:
        tensor = with_model_dim(value, context.num_models)
        return tensor.reshape(context.num_models, *([1] * (y.ndim - 1 - rank)), *tensor.shape[1:])

    if weight is not None and bias is not None:
        return spread(bias).addcmul(y, spread(weight))
    if weight is not None:
        return y * spread(weight)
    return y if bias is None else y + spread(bias)
