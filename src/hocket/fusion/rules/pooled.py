r"""A convolution one element wide, batch norm, ReLU and the maximum over the elements, as one op (PointNet's features).

    x = W a + b            (N, O, L)    W (O, C), a (N, C, L), and M = N L elements in each channel
    y = norm(x)            (N, O, L)    y = s (x - mean) + beta, s = gamma / sqrt(var + eps), over N and L
    z = max_l relu(y)      (N, O)

Only z goes on, so neither y nor, in the backward, anything else of x's size is needed:

    statistics      mean = W a' + b, var = diag(W G W^T) / M, a' the mean of a, G = (a - a')(a - a')^T, C x C
    maximum         y rises with x where gamma > 0, so y's is at x's; where gamma < 0 it is at x's least
    gradient        dy is zero but at N O places, so dx = S - alpha - diag(kappa) W (a - a'), where S is that sparse

    dW = S (a - a')^T - diag(kappa) W G
    da = W^T S - W^T alpha - (W^T diag(kappa) W) (a - a')

Matrices C x C stand where the convolution's backward has O x C, and nothing of x's size is kept for it. Models come one
after another, so x stays in the cache. Where elements tie they share the gradient, as in `torch.amax`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Norm", "can_pool", "pooled", "pooled_plainly"]

WIDER = 2  # O / C from which this pays


@dataclass(frozen=True)
class Norm:
    """How the batch norm is set.

    Attributes:
        momentum: of the running statistics.
        eps: what is added to the variance.
        rectified: whether a ReLU follows.
    """

    momentum: float
    eps: float
    rectified: bool


def can_pool(a: Tensor, weight: Tensor, gamma: Tensor | None) -> bool:
    """Whether `pooled` may be called for a model's input ``(N, C, L)`` and filters ``(O, C, 1)``."""
    if gamma is None or a.ndim != 3 or a.shape[0] * a.shape[2] < 2 or a.shape[1] != weight.shape[1]:
        return False
    kinds = {a.dtype, weight.dtype, gamma.dtype}
    same = len(kinds) == 1 and kinds <= {torch.float32, torch.float64} and {a.device.type} == {"cpu"}
    if not same or weight.shape[0] < WIDER * weight.shape[1] or a.shape[2] >= 2**24:
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    return bool((gamma != 0).all())


def pooled_plainly(a: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, norm: Norm) -> Tensor:
    """The same by torch's own ops, without running statistics."""
    y = functional.batch_norm(functional.conv1d(a, weight, bias), None, None, gamma, beta, True, 0.0, norm.eps)
    return torch.amax(y.relu() if norm.rectified else y, 2)


def pooled(a: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running: Any, norm: Norm) -> Tensor:
    """One model's ``(N, O)``.

    Args:
        a: ``(N, C, L)``; see `can_pool`.
        weight: ``(O, C, 1)``.
        bias: ``(O,)``.
        gamma: ``(O,)``, the norm's scale.
        beta: ``(O,)``, its shift.
        running: running mean and variance, which change in place, or None.
        norm: how the norm is set.
    """
    out: Tensor = _Pooled.apply(a, weight, bias, gamma, beta, running, norm)
    return out


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running: tuple[Tensor, Tensor] | None,
        norm: Norm,
    ) -> Tensor:
        examples, channels, points = a.shape
        elements = examples * points
        filters = weight.squeeze(2)
        columns = a.transpose(0, 1).reshape(channels, elements)
        centre = columns.mean(1, keepdim=True)
        columns = columns - centre
        product = filters @ (columns @ columns.t())  # W G
        mean = (filters @ centre).squeeze(1) + bias
        var = (product * filters).sum(1) / elements
        inverse = (var + norm.eps).rsqrt()
        if running is not None:
            running[0].mul_(1 - norm.momentum).add_(mean, alpha=norm.momentum)
            running[1].mul_(1 - norm.momentum).add_(var, alpha=norm.momentum * elements / (elements - 1))
        x = functional.conv1d(a.contiguous(), weight, bias)
        extreme = x.amax(2)
        if bool((gamma < 0).any()):
            extreme = torch.where(gamma < 0, x.amin(2), extreme)
        hat = (extreme - mean) * inverse
        out = torch.addcmul(beta, hat, gamma)
        if norm.rectified:
            out = out.relu_()
        if any(ctx.needs_input_grad):
            places = _places(x, extreme)
            ctx.save_for_backward(a, weight, bias, gamma, beta, columns, product, inverse, hat, out, *places)
            ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, weight, bias, gamma, beta, columns, product, inverse, hat, out, *places = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():
            return _twice(grad, (a, weight, bias, gamma, beta), ctx.needs_input_grad, ctx.norm)
        examples, channels, points = a.shape
        elements, outputs = examples * points, weight.shape[0]
        filters = weight.squeeze(2)
        if ctx.norm.rectified:
            grad = grad * (out > 0)
        scale = gamma * inverse
        sum_dy = grad.sum(0)
        sum_dy_hat = (grad * hat).sum(0)
        alpha = scale * sum_dy / elements
        kappa = scale * inverse * sum_dy_hat / elements
        rows = columns.t().contiguous()  # (M, C), of a - a'
        if len(places) == 1:
            places, values, channel = places[0].flatten(), (grad * scale).flatten(), _channels(examples, outputs)
        else:
            example, channel, place = places
            values = (grad * scale / _count(example, channel, grad))[example, channel]
            places = example * points + place
        d_weight = d_a = None
        if ctx.needs_input_grad[1]:
            sparse = _gathered(channel, places, values, rows, outputs)
            d_weight = torch.addcmul(sparse, product, kappa.unsqueeze(1), value=-1).unsqueeze(2)
        if ctx.needs_input_grad[0]:
            inner = filters.t() @ (filters * kappa.unsqueeze(1))
            d_rows = _gathered(places, channel, values, filters, elements)
            d_rows.sub_(filters.t() @ alpha).addmm_(rows, inner, alpha=-1)
            d_a = d_rows.view(examples, points, channels).transpose(1, 2).contiguous()
        return d_a, d_weight, torch.zeros_like(bias), sum_dy_hat, sum_dy, None, None


def _places(x: Tensor, extreme: Tensor) -> tuple[Tensor, ...]:
    """Where the extremes are: ``(N, O)``, counted through all examples; example, channel, place of each if some tie."""
    examples, _, points = x.shape
    found = torch.eq(x, extreme.unsqueeze(2), out=torch.empty_like(x))
    ones = torch.ones(points, 1, dtype=x.dtype)
    numbers = torch.arange(points, dtype=x.dtype).unsqueeze(1)
    counted, place = (found @ torch.cat((ones, numbers), 1)).unbind(2)
    if bool((counted == 1).all()):
        return (place.long() + points * torch.arange(examples).unsqueeze(1),)
    return tuple(found.nonzero().unbind(1))


def _channels(examples: int, outputs: int) -> Tensor:
    return torch.arange(outputs).repeat(examples)


def _count(example: Tensor, channel: Tensor, like: Tensor) -> Tensor:
    """How many elements tie, ``(N, O)``; at least one."""
    ones = torch.ones_like(example, dtype=like.dtype)
    return torch.zeros_like(like).index_put_((example, channel), ones, accumulate=True).clamp_(min=1)


def _gathered(target: Tensor, source: Tensor, values: Tensor, table: Tensor, size: int) -> Tensor:
    """``out[target[k]] += values[k] table[source[k]]``, for `size` rows."""
    order = torch.argsort(target)
    starts = torch.searchsorted(target[order], torch.arange(size))
    return functional.embedding_bag(
        source[order], table, starts, mode="sum", per_sample_weights=values[order].contiguous()
    )


def _twice(grad: Tensor, given: tuple[Tensor, ...], needed: tuple[bool, ...], norm: Norm) -> tuple[Tensor | None, ...]:
    """A backward that can be differentiated again."""
    a, weight, bias, gamma, beta = given
    out = pooled_plainly(a, weight, bias, gamma, beta, norm)
    wanted = [each for each, need in zip(given, needed, strict=False) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    own = [next(found) if need else None for need, _ in zip(needed, given, strict=False)]
    return (*own, None, None)
