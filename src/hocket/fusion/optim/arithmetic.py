"""Arithmetic of updates: on lists of tensors, with a scalar that all models share or a factor for each of them.

A *factor* is a float, or a list of tensors that broadcast against the tensors beside them: (B, 1, ...) against
(B, n, ...). With floats these are the very calls of torch's foreach optimizers, so a fused optimizer without
per-model numbers does what torch's does, bit for bit. `addcmul_` and `addcdiv_` multiply their factor into the first
operand before anything else, as torch's kernels do with their scalar: a factor rounds as the scalar would.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hocket.fusion.optim.hyper import Number

__all__ = ["Factor", "Tensors", "add", "add_", "addcdiv_", "addcmul_", "counted", "divided", "is_on", "lerp_", "power"]

Tensors = list[torch.Tensor]
Factor = float | Tensors


def add_(xs: Tensors, ys: Tensors, alpha: Factor) -> None:
    """``x += alpha * y``."""
    if isinstance(alpha, list):
        torch._foreach_addcmul_(xs, ys, alpha)
    else:
        torch._foreach_add_(xs, ys, alpha=alpha)


def add(xs: Tensors, ys: Tensors, alpha: Factor) -> Tensors:
    """``x + alpha * y``."""
    if isinstance(alpha, list):
        return list(torch._foreach_addcmul(xs, ys, alpha))
    return list(torch._foreach_add(xs, ys, alpha=alpha))


def addcmul_(xs: Tensors, ys: Tensors, zs: Tensors, value: Factor) -> None:
    """``x += value * y * z``."""
    if isinstance(value, list):
        torch._foreach_addcmul_(xs, torch._foreach_mul(ys, value), zs)
    else:
        torch._foreach_addcmul_(xs, ys, zs, value)


def addcdiv_(xs: Tensors, ys: Tensors, zs: Tensors, value: Factor) -> None:
    """``x += value * y / z``."""
    if isinstance(value, list):
        torch._foreach_addcdiv_(xs, torch._foreach_mul(ys, value), zs)
    else:
        torch._foreach_addcdiv_(xs, ys, zs, value)


def lerp_(xs: Tensors, ys: Tensors, weight: Factor) -> None:
    """``x += weight * (y - x)``."""
    if isinstance(weight, list) and any(w.dtype != x.dtype for w, x in zip(weight, xs, strict=True)):
        # Half precision: factors are float32 there, and lerp does not mix the two.
        torch._foreach_addcmul_(xs, torch._foreach_sub(ys, xs), weight)
    else:
        torch._foreach_lerp_(xs, ys, weight)


def is_on(number: Number) -> bool:
    """Whether a term with this coefficient takes part: a per-model number always does, a zero for all never."""
    return isinstance(number, torch.Tensor) or number != 0


def counted(function: Callable[[float], float], step: Number) -> Number:
    """`function` of the number of steps: of one count, or of each model's.

    Both in Python floats, so that a model counts alike whether or not the others keep in step with it.
    """
    if isinstance(step, torch.Tensor):
        return torch.tensor([function(count) for count in step.tolist()], dtype=torch.float64)
    return function(step)


def divided(dividend: Number, divisor: Number) -> Number:
    """``dividend / divisor``, rounded once whichever of them is a number for all (torch takes a reciprocal first)."""
    if isinstance(divisor, torch.Tensor):
        if not isinstance(dividend, torch.Tensor):
            dividend = torch.ones_like(divisor) * dividend
        return dividend / divisor.to(dividend.device)
    return dividend / divisor


def power(base: Number, step: Number) -> Number:
    """``base ** step``."""
    if not isinstance(base, torch.Tensor):
        return counted(lambda count: base**count, step)
    if not isinstance(step, torch.Tensor):
        # Counts of shape (B,) even where they are equal: the kernel for one exponent rounds otherwise.
        step = torch.ones_like(base, dtype=torch.float64) * step
    return torch.pow(base, step.to(base.device))
