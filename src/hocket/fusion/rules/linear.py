"""Linear layers and matrix products: one product per model becomes one batched product (HFTA, Appendix B).

    y_i = x_i W_i^T + b_i, i < B     ->     baddbmm(b, x, W^T):  (B, N, in) x (B, in, out)

HFTA puts the weights side by side where all models read the same input, (N, in) x (in, B*out). The batched product
reads that input B times, from the cache, and its output and gradients lie model by model, as what follows wants them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hocket.fusion.gradients import GradientMemory
from hocket.fusion.rules.base import OpContext, is_watched, rule
from hocket.fusion.stacked import Stacked, align, with_model_dim


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(B, rows, in)`` by weights ``(B, out, in)``."""
    columns = weight.transpose(1, 2)
    return torch.bmm(x, columns) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, columns)


class _Product(torch.autograd.Function):
    """``baddbmm(bias, x, weight^T)`` with the weight gradient ``g^T x`` in the weight's layout.

    torch's own is the transpose of ``x^T g``, whose accumulation copies all weights. Large gradients are written into
    memory that is kept from step to step, because zeroing fresh pages takes as long as the write.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, memory: GradientMemory | None) -> Tensor:
        ctx.memory, ctx.whole = memory, weakref.ref(weight)
        y = product(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))  # under autocast the product is of another type
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        x_type, weight_type, bias_type = ctx.types
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_weight = None
        if wants_weight:
            whole = ctx.whole()
            is_plain = not torch.is_grad_enabled() and weight.dtype == weight_type and not is_watched()
            place = ctx.memory.place(whole) if ctx.memory is not None and whole is not None and is_plain else None
            of_weight = torch.bmm(grad.transpose(1, 2), x, out=place).to(weight_type)
        return (
            torch.bmm(grad, weight).to(x_type) if wants_x else None,
            of_weight,
            grad.sum(1).to(bias_type) if wants_bias else None,
            None,
        )


@rule("linear")
def linear(context: OpContext, input: Any, weight: Any, bias: Any = None) -> Any:
    """``(*, in)`` to ``(*, out)``."""
    num_models = context.num_models
    if not isinstance(weight, Stacked) or (bias is not None and not isinstance(bias, Stacked)):
        if isinstance(weight, Stacked) or isinstance(bias, Stacked):
            return NotImplemented
        return Stacked(functional.linear(input.tensor, weight, bias))
    out_features, in_features = weight.shape
    if isinstance(input, Stacked):
        x = input.tensor
        rows = x.unsqueeze(1) if x.ndim == 2 else x if x.ndim == 3 else x.reshape(num_models, -1, in_features)
    else:  # what all models read is there once
        x = input.expand(num_models, *input.shape)
        rows = input.reshape(-1, in_features).expand(num_models, -1, in_features)
    offset = None if bias is None else bias.tensor
    transformed = torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() and weight.tensor.requires_grad and not transformed:
        y = _Product.apply(rows, weight.tensor, offset, context.memory)
    else:
        y = product(rows, weight.tensor, offset)
    return Stacked(y if x.ndim == 3 else y.reshape(*x.shape[:-1], out_features))


@rule("bilinear")
def bilinear(context: OpContext, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """``y[.., o] = x1 A[o] x2``: a batched product with the weights of all models, then a sum over the second input."""
    first, second, table = (with_model_dim(each, context.num_models) for each in (input1, input2, weight))
    y = torch.einsum("b...i,boij,b...j->b...o", first, table, second)
    return Stacked(y) if bias is None else Stacked(torch.add(*align((Stacked(y), bias))))


@rule("matmul", "bmm", "__matmul__", "mm", "rmatmul")
def matmul(context: OpContext, input: Any, other: Any, **kwargs: Any) -> Any:
    """Matrix products of any rank. Products with vectors fall back to vmap."""
    if kwargs or min(input.ndim, other.ndim) < 2:
        return NotImplemented
    return Stacked(torch.matmul(*align((input, other))))


@rule("einsum")
def einsum(context: OpContext, equation: str, *operands: Any) -> Any:
    """Einstein's sum, with one more letter for the models."""
    tensors: tuple[Any, ...] = tuple(operands[0]) if isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return NotImplemented
    free = next((letter for letter in "ZYXWVUTS" if letter not in equation), None)
    if free is None:
        return NotImplemented
    terms, result = equation.replace(" ", "").split("->")
    marked = [
        free + term if isinstance(tensor, Stacked) else term
        for term, tensor in zip(terms.split(","), tensors, strict=True)
    ]
    plain: list[Tensor] = [tensor.tensor if isinstance(tensor, Stacked) else tensor for tensor in tensors]
    return Stacked(torch.einsum(f"{','.join(marked)}->{free}{result}", *plain))
