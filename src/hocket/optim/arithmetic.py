"""Arithmetic of updates: on lists of tensors, with a scalar that all models share or a factor for each of them.

A *factor* is a float, or a list of tensors that broadcast against the tensors beside them: (B, 1, ...) against
(B, n, ...). With floats these are the very calls of torch's foreach optimizers, so a fused optimizer without
per-model numbers does what torch's does, bit for bit. `addcmul_` and `addcdiv_` multiply their factor into the first
operand before anything else, as torch's kernels do with their scalar: a factor rounds as the scalar would.
"""

from __future__ import annotations

import math

import torch

from hocket.optim.hyper import Number

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


def root_and(xs: Tensors, eps: Factor) -> Tensors:
    """``x ** 0.5 + eps``."""
    roots = list(torch._foreach_sqrt(xs))
    torch._foreach_add_(roots, eps)
    return roots


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
    """True if a term with this coefficient takes part: a per-model number always does, a zero for all never."""
    return isinstance(number, torch.Tensor) or number != 0


def divided(dividend: Number, divisor: Number) -> Number:
    """``dividend / divisor``, rounded once whichever of them is a number for all (torch takes a reciprocal first)."""
    if isinstance(divisor, torch.Tensor) and not isinstance(dividend, torch.Tensor):
        dividend = torch.ones_like(divisor) * dividend
    return dividend / divisor


def power(base: Number, exponent: Number) -> Number:
    """``base ** exponent``, with the same rounding for one model and for many.

    torch's vectorised kernel rounds differently from Python. Operands with a stride of two use its scalar loop.
    """
    tensors = [each for each in (base, exponent) if isinstance(each, torch.Tensor)]
    if not tensors:
        return base**exponent
    ones = torch.ones(tensors[0].shape, dtype=torch.float64, device=tensors[0].device)
    return torch.pow(*(torch.stack((each, each), -1)[..., 0] for each in (ones * base, ones * exponent)))


def root(number: Number) -> Number:
    """The square root, correctly rounded."""
    return number.sqrt() if isinstance(number, torch.Tensor) else math.sqrt(number)
