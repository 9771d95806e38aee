"""Activations, arithmetic and everything else that works element by element: the op itself, with ranks made to agree.

Parameters of the options (a slope, a threshold) are the same in all models: where they differ, the block stays
separate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.fusion.rules.base import IN_PLACE, OpContext, rule
from hocket.fusion.stacked import Stacked, align, unwrap, with_model_dim

ELEMENTWISE = (
    "abs", "neg", "negative", "positive", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt",
    "square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
    "erfc", "erfinv", "sigmoid", "logit", "floor", "ceil", "round", "trunc", "frac", "sign", "sgn", "reciprocal",
    "isnan", "isinf", "isfinite", "lgamma", "digamma", "sinc", "nan_to_num", "bitwise_not", "logical_not", "relu",
    "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu",
    "softplus", "softsign", "softshrink", "hardshrink", "tanhshrink", "logsigmoid", "threshold", "clamp", "clip",
    "clamp_min", "clamp_max", "contiguous", "clone", "detach", "detach_", "float", "double", "half", "bfloat16", "int",
    "long", "bool", "type", "alias", "requires_grad_", "_to_copy", "lift_fresh_copy", "invert", "inv", "not_", "pos",
    "cpu", "cuda", "zeros_like", "ones_like", "full_like", "fill_", "zero_", "empty_like", "log_sigmoid", "add", "sub",
    "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "floordiv", "floor_divide", "remainder",
    "fmod", "mod", "pow", "rsub", "radd", "rmul", "atan2", "hypot", "maximum", "minimum", "fmax", "fmin", "where",
    "lerp", "addcmul", "addcdiv", "copysign", "eq", "ne", "lt", "le", "gt", "ge", "greater", "less", "greater_equal",
    "less_equal", "not_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "and_", "or_", "xor", "lshift", "rshift", "masked_fill", "logaddexp", "xlogy", "heaviside", "ldexp", "nextafter",
    "isclose", "polar", "complex",
)  # fmt: skip


NUMBERS = (  # of two arguments, either of which may be a number
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "pow", "eq", "ne", "lt",
    "le", "gt", "ge", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_",
)  # fmt: skip


@rule("pointwise", *ELEMENTWISE, *(name + "_" for name in ELEMENTWISE if not name.endswith("_")))
def pointwise(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """Any function of elements, of as many tensors as it takes."""
    if not kwargs:
        return _kept(context, args, context.target(*align(args)))
    values = align((*args, *kwargs.values()))
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    return _kept(context, args, context.target(*values[: len(args)], **named))


def _kept(context: OpContext, args: tuple[Any, ...], result: Tensor) -> Any:
    """Wrap the result. An in-place op returns the very `Stacked` that it changed."""
    if args and isinstance(args[0], Stacked) and result is args[0].tensor:
        return args[0]
    return Stacked(result)


@rule("to", "type_as")
def converted(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.to(y)`` takes only dtype and device of another tensor, whose shape and model axis do not count."""
    own = input if isinstance(input, Stacked) else Stacked(with_model_dim(input, context.num_models))
    args, kwargs = unwrap((args, kwargs))
    return _kept(context, (own,), context.target(own.tensor, *args, **kwargs))


@rule(*IN_PLACE, "copy_")
def written(context: OpContext, input: Any, other: Any) -> Any:
    """``x += y`` and ``x.copy_(y)``, in place. A value that all models share is copied for each model first."""
    own = input if isinstance(input, Stacked) else Stacked(with_model_dim(input, context.num_models).clone())
    return pointwise(context, own, other)


@rule("_is_all_true")
def all_true(context: OpContext, input: Stacked) -> Any:
    """One condition for each model."""
    return Stacked(input.tensor.reshape(context.num_models, -1).all(1))


@rule("_assert", "_assert_async")
def asserted(context: OpContext, condition: Stacked, *message: Any, **named: Any) -> Any:
    """A condition that has to hold in all models."""
    return context.target(condition.tensor.all(), *message, **named)


@rule("prelu", "_prelu_kernel")
def prelu(context: OpContext, input: Any, weight: Any) -> Any:
    """``(N, C, ...)`` with a slope per channel or one for all, in every model."""
    if input.ndim == 0:
        return NotImplemented
    x, slope = with_model_dim(input, context.num_models), with_model_dim(weight, context.num_models)
    if input.ndim > 1:  # channels are the second axis
        slope = slope.reshape(context.num_models, 1, -1, *[1] * (input.ndim - 2))
    return Stacked(torch.where(x > 0, x, slope * x))
