"""Normalisation. Statistics are per channel, so the models' channels side by side keep their statistics apart.

batch norm      (N, B*C, ...)   weights, running statistics (B, C) seen as (B*C)
instance norm   the same
group norm      (N, B*C, ...)   with B*G groups
layer norm      over the last axes, then each model's own scale and shift
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import InputError
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, from_channels, to_channels, unwrap, with_model_dim


def _flat(value: Any, num_models: int) -> Tensor | None:
    """``(B, C)`` as ``(B*C)``: a view, so that running statistics are written where they belong."""
    if value is None:
        return None
    return value.tensor.view(-1) if isinstance(value, Stacked) else value.repeat(num_models)


@rule("batch_norm")
def batch_norm(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Called as a function: ``F.batch_norm`` has the statistics first, ``aten.batch_norm`` the weights."""
    names = ["running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"]
    if context.target is not functional.batch_norm:
        names = ["weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = [given.get(name) for name in ("running_mean", "running_var", "weight", "bias")]
    if any(isinstance(value, Tensor) for value in tensors[:2]):
        return NotImplemented
    training, momentum, eps = given.get("training", False), given.get("momentum", 0.1), given.get("eps", 1e-5)
    return _batch_norm(context, input, tensors, training, momentum, eps)


def _batch_norm(
    context: OpContext, input: Any, tensors: Sequence[Any], training: bool, momentum: float, eps: float
) -> Any:
    """With the running mean and variance, weight and bias of each model."""
    x, num_models = with_model_dim(input, context.num_models), context.num_models
    flat: Any = [_flat(value, num_models) for value in tensors]
    options: Any = (training, momentum, eps)
    if x.ndim < 3:
        return NotImplemented
    swapped = x.transpose(1, 2)
    if x.ndim > 3 and swapped.is_contiguous() and not x.is_contiguous():  # (B, C, N, ...): one example, B*C channels
        _check_enough(context, swapped, training)
        one = swapped.reshape(1, x.shape[0] * x.shape[2], -1)
        y = functional.batch_norm(one, *flat, *options)
        return Stacked(y.view(swapped.shape).transpose(1, 2))
    return Stacked(from_channels(functional.batch_norm(to_channels(x), *flat, *options), num_models))


def _check_enough(context: OpContext, swapped: Tensor, training: bool) -> None:
    """Torch's own check, of one model's ``(C, N, ...)``."""
    if training and swapped[0, 0].numel() == 1:
        raise InputError(f"{context.where}: expected more than one value per channel when training")


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@rule(*BATCH_NORMS)
def batch_norm_module(context: OpContext, input: Any) -> Any:
    """With running statistics and a count of batches of its own in each model."""
    module: Any = context.modules[0]
    module._check_input_dim(input)
    return _batch_norm(context, input, *_state_of(module, context.lookup))


def plain_batch_norm(module: Any) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """One model's layer, without its tensors, as a function of them and of the input."""

    def norm(tensors: Mapping[str, Tensor], input: Tensor) -> Tensor:
        module._check_input_dim(input)
        state, *options = _state_of(module, tensors.get)
        return functional.batch_norm(input, *state, *options)

    return norm


def _state_of(module: Any, lookup: Callable[[str], Any]) -> tuple[list[Any], bool, float, float]:
    """The tensors and options of a layer, of one model or of all, after its count of batches."""
    training, tracked = module.training, module.track_running_stats
    if training and tracked and (counted := lookup("num_batches_tracked")) is not None:
        unwrap(counted).add_(1)
    state = [lookup(name) for name in ("running_mean", "running_var", "weight", "bias")]
    by_batch = training or state[0] is None
    if training and not tracked:
        state[:2] = None, None
    return state, by_batch, 0.0 if module.momentum is None else module.momentum, module.eps


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm_module(context: OpContext, input: Any) -> Any:
    """Normalise every example and channel by itself. Running statistics, where kept, are per model."""
    module: Any = context.modules[0]
    module._check_input_dim(input)
    if input.ndim == module._get_no_batch_dim():
        return NotImplemented
    state = [context.lookup(name) for name in ("running_mean", "running_var", "weight", "bias")]
    flat: Any = [_flat(value, context.num_models) for value in state]
    together = to_channels(with_model_dim(input, context.num_models))
    options: Any = module.training or not module.track_running_stats, module.momentum or 0.0, module.eps
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
