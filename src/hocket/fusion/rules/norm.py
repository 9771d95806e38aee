"""Normalisation. Statistics are per channel, so the models' channels side by side keep their statistics apart.

batch norm      (N, B*C, ...)   weights, running statistics (B, C) seen as (B*C)
instance norm   the same
group norm      (N, B*C, ...)   with B*G groups
layer norm      over the last axes, then each model's own scale and shift
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import InputError
from hocket.fusion.rules.base import OpContext, module_rule, rule
from hocket.fusion.stacked import Stacked, from_channels, to_channels, with_model_dim


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
    statistics = (given.get("running_mean"), given.get("running_var"))
    if any(isinstance(value, Tensor) for value in statistics):
        return NotImplemented
    training = given.get("training", False)
    return _batch_norm(
        context,
        input,
        *statistics,
        given.get("weight"),
        given.get("bias"),
        training,
        given.get("momentum", 0.1),
        given.get("eps", 1e-5),
    )


def _batch_norm(
    context: OpContext,
    input: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    x, num_models = with_model_dim(input, context.num_models), context.num_models
    flat: Any = [_flat(value, num_models) for value in (mean, var, weight, bias)]
    if x.ndim < 3:
        return NotImplemented
    swapped = x.transpose(1, 2)
    if x.ndim > 3 and swapped.is_contiguous() and not x.is_contiguous():  # (B, C, N, ...): one example, B*C channels
        _check_enough(context, swapped, training)
        one = swapped.reshape(1, x.shape[0] * x.shape[2], -1)
        y = functional.batch_norm(one, flat[0], flat[1], flat[2], flat[3], training, momentum, eps)
        return Stacked(y.view(swapped.shape).transpose(1, 2))
    together = x.transpose(0, 1).flatten(1) if x.ndim == 3 else to_channels(x)
    y = functional.batch_norm(together, flat[0], flat[1], flat[2], flat[3], training, momentum, eps)
    return Stacked(from_channels(y, num_models))


def _check_enough(context: OpContext, swapped: Tensor, training: bool) -> None:
    """Torch's own check, of one model's ``(C, N, ...)``."""
    if training and swapped[0, 0].numel() == 1:
        raise InputError(f"{context.where}: expected more than one value per channel when training")


@module_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_module(context: OpContext, input: Any) -> Any:
    """With running statistics and a count of batches of its own in each model."""
    module = context.modules[0]
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    _check_rank(context, module, input.ndim)
    mean, var = context.lookup("running_mean"), context.lookup("running_var")
    counted = context.lookup("num_batches_tracked")
    if module.training and module.track_running_stats and counted is not None:
        counted.tensor.add_(1)
    training = module.training or mean is None
    if module.training and not module.track_running_stats:
        mean = var = None
    momentum = 0.0 if module.momentum is None else module.momentum
    weight, bias = context.lookup("weight"), context.lookup("bias")
    return _batch_norm(context, input, mean, var, weight, bias, training, momentum, module.eps)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def plain_batch_norm(module: nn.Module) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """One model's layer, without its tensors, as a function of them and of the input."""
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    counts, averages = (
        module.training and module.track_running_stats,
        not (module.training and not module.track_running_stats),
    )
    momentum, eps = 0.0 if module.momentum is None else module.momentum, module.eps

    def norm(tensors: Mapping[str, Tensor], input: Tensor) -> Tensor:
        module._check_input_dim(input)
        of, mean, var = tensors.get, tensors.get("running_mean"), tensors.get("running_var")
        if counts and (counted := of("num_batches_tracked")) is not None:
            counted.add_(1)
        training = module.training or mean is None
        mean, var = (mean, var) if averages else (None, None)
        return functional.batch_norm(input, mean, var, of("weight"), of("bias"), training, momentum, eps)

    return norm


RANKS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.InstanceNorm1d: (3,),
    nn.InstanceNorm2d: (4,),
    nn.InstanceNorm3d: (5,),
}


def _check_rank(context: OpContext, module: nn.Module, rank: int) -> None:
    expected = RANKS[type(module)]
    if rank not in expected:
        axes = " or ".join(map(str, expected))
        raise InputError(f"{context.where}: {type(module).__name__} expects {axes} axes in each model, got {rank}")


@module_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm_module(context: OpContext, input: Any) -> Any:
    """Every example and channel by itself; running statistics, where kept, per model."""
    module = context.modules[0]
    assert isinstance(module, nn.modules.instancenorm._InstanceNorm)
    if input.ndim not in RANKS[type(module)]:
        return NotImplemented  # without a batch axis
    mean, var = context.lookup("running_mean"), context.lookup("running_var")
    use_input_stats = module.training or not module.track_running_stats
    weight, bias = context.lookup("weight"), context.lookup("bias")
    flat: Any = [_flat(value, context.num_models) for value in (mean, var, weight, bias)]
    together = to_channels(with_model_dim(input, context.num_models))
    momentum = 0.0 if module.momentum is None else module.momentum
    y = functional.instance_norm(together, flat[0], flat[1], flat[2], flat[3], use_input_stats, momentum, module.eps)
    return Stacked(from_channels(y, context.num_models))


@rule("group_norm")
def group_norm(
    context: OpContext, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """B models with G groups are one with B*G groups."""
    if input.ndim < 2:
        return NotImplemented
    num_models = context.num_models
    x = with_model_dim(input, num_models)
    together = x.transpose(0, 1).flatten(1) if x.ndim == 3 else to_channels(x)
    y = functional.group_norm(
        together, num_models * num_groups, _flat(weight, num_models), _flat(bias, num_models), eps
    )
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
    return Stacked(_scaled(context, y, weight, bias, len(shape)))


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
