"""Clipping of gradients, of each model on its own.

One norm over all models would let one that explodes hold back the others. Here each has its norm and its factor::

    gradients (B, ...)  --norms over all but the first dimension, then over parameters-->  (B,)  --> factor (B, 1, ...)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hocket.errors import InputError
from hocket.optim.hyper import Bound, by_model, numbers_of
from hocket.optim.slots import slots_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    num_models: int | None = None,
) -> torch.Tensor:
    """Scale down the gradients of each model whose norm exceeds `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: of a fused model.
        max_norm: one, or B in a list.
        norm_type: the p of the p-norm, ``inf`` for the largest element.
        error_if_nonfinite: raise where a norm is not finite. Without it, such a model's gradients become NaN or 0.
        num_models: B, where the parameters do not say so themselves.

    Returns:
        The norms before clipping, of shape (B,).

    Raises:
        InputError: a negative norm, a list of the wrong length, or a norm that is not finite, with the model's number.

    Example:
        >>> weights = torch.nn.Parameter(torch.zeros(2, 4)); weights.grad = torch.tensor([[3.0] * 4, [0.5] * 4])
        >>> clip_grad_norm_([weights], max_norm=[3.0, 2.0], num_models=2).tolist()
        [6.0, 1.0]
        >>> [[round(value, 4) for value in row] for row in weights.grad[:, :2].tolist()]
        [[1.5, 1.5], [0.5, 0.5]]
    """
    slots = slots_of([parameters] if isinstance(parameters, torch.Tensor) else parameters, num_models)
    limits = numbers_of("max_norm", max_norm, slots.num_models, Bound())
    with torch.no_grad():
        params = slots.gradients()
        if not params:
            return torch.zeros(slots.num_models)
        norms = [slots.reduced(p, grad, float(norm_type)).to(params[0][1].device) for p, grad in params]
        total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type), dim=0)
        if error_if_nonfinite and not bool(torch.isfinite(total).all()):
            bad = [model for model, fine in enumerate(torch.isfinite(total).tolist()) if not fine]
            raise InputError(f"the gradients' norm of order {norm_type} is not finite for model {bad}")
        factors = torch.clamp(torch.as_tensor(limits, dtype=total.dtype, device=total.device) / (total + 1e-6), max=1.0)
        for p, grad in params:
            grad.mul_(slots.column(factors.to(p.device, torch.promote_types(p.dtype, factors.dtype)), p))
    return total


def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: Any, *, num_models: int | None = None
) -> None:
    """Clamp the gradients of each model to ``[-clip_value, clip_value]``, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        parameters: of a fused model.
        clip_value: one, or B in a list.
        num_models: B, where the parameters do not say so themselves.

    Raises:
        InputError: a negative value, a list of the wrong length.

    Example:
        >>> weights = torch.nn.Parameter(torch.zeros(2, 2)); weights.grad = torch.tensor([[3.0, -3.0], [3.0, 0.5]])
        >>> clip_grad_value_([weights], [1.0, 2.0], num_models=2); weights.grad.tolist()
        [[1.0, -1.0], [2.0, 0.5]]
    """
    slots = slots_of([parameters] if isinstance(parameters, torch.Tensor) else parameters, num_models)
    limits = numbers_of("clip_value", clip_value, slots.num_models, Bound())
    with torch.no_grad():
        for p, grad in slots.gradients():
            row = torch.tensor(by_model(limits, slots.num_models), dtype=grad.dtype, device=grad.device)
            limit = slots.column(row, p)
            torch.clamp(grad, min=-limit, max=limit, out=grad)
