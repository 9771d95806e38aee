"""Attention: the projections are linear layers, and every model's heads are more rows of one batch.

q, k, v   (B, N, heads, L, E)  ->  scaled_dot_product_attention over (B*N, heads, L, E)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.dropout import dropped, rates_of
from hocket.fusion.rules.linear import linear
from hocket.fusion.stacked import Stacked, with_model_dim


@rule("scaled_dot_product_attention")
def sdpa(
    context: OpContext,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of queries ``(N, ..., L, E)``, with a mask for all models or one for each."""
    if min(value.ndim for value in (query, key, value)) < 3:
        return NotImplemented
    num_models = context.num_models
    q, k, v = (with_model_dim(each, num_models) for each in (query, key, value))
    mask = _mask(context, attn_mask, q.ndim - 1)
    if any(rates := rates_of(context, dropout_p)):
        if enable_gqa:  # several heads of queries have one head of keys and values
            k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        return Stacked(_weighted(context, q, k, v, mask, is_causal, rates, scale)[0])
    if mask is not None and mask.ndim == q.ndim:
        mask = mask.expand(num_models, q.shape[1], *mask.shape[2:]).flatten(0, 1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Stacked(y.unflatten(0, (num_models, -1)))


def _mask(context: OpContext, mask: Any, rank: int) -> Tensor | None:
    """A shared mask, or ``(B, 1, ..., L, S)`` where models have their own."""
    if not isinstance(mask, Stacked):
        return mask.unsqueeze(0) if mask is not None and mask.ndim == rank else mask
    missing = rank - mask.ndim
    return mask.tensor.reshape(context.num_models, *([1] * missing), *mask.shape)


def _weighted(
    context: OpContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    rates: list[float],
    scale: float | None = None,
    softmax: Callable[[Tensor, int], Tensor] = torch._safe_softmax,
) -> tuple[Tensor, Tensor]:
    """Attention written out, for where the weights are asked for or dropped: the result and the weights.

    A query all of whose keys are masked gets zeros by torch's attention, and NaN where the weights are asked for.
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * factor, k.transpose(-2, -1))
    if is_causal:
        below = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~below, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = softmax(scores, -1)
    if any(rates):
        weights = dropped(context, Stacked(weights), rates).tensor
    return torch.matmul(weights, v), weights


@rule("multi_head_attention_forward")
def multihead(
    context: OpContext,
    query: Any,
    key: Any,
    value: Any,
    width: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Batched input ``(L, N, E)``, equal or different widths of keys and values, masks for all models or for each."""
    has_more = bias_k is not None or add_zero_attn or static_k is not None or static_v is not None
    separate = [q_proj_weight, k_proj_weight, v_proj_weight] if use_separate_proj_weight else [in_proj_weight]
    is_own = not any(isinstance(each, Tensor) for each in (*separate, in_proj_bias, out_proj_weight, out_proj_bias))
    if query.ndim != 3 or has_more or (is_causal and attn_mask is None) or not is_own:
        return NotImplemented
    q, k, v = _projected(context, (query, key, value), separate, in_proj_bias)  # (B, N, L, E) each
    q, k, v = (each.unflatten(-1, (num_heads, -1)).transpose(2, 3) for each in (q, k, v))  # (B, N, heads, L, E/heads)
    mask = _joined_mask(attn_mask, key_padding_mask, q)
    rates = rates_of(context, dropout_p if training else 0.0)
    weights = None
    if need_weights or any(rates):
        softmax = torch.softmax if need_weights else torch._safe_softmax
        y, weights = _weighted(context, q, k, v, mask, False, rates, softmax=softmax)
    else:
        y = sdpa(context, Stacked(q), Stacked(k), Stacked(v), None if mask is None else Stacked(mask)).tensor
    joined = Stacked(y.transpose(2, 3).flatten(3))
    out = Stacked(linear(context, joined, out_proj_weight, out_proj_bias).tensor.transpose(1, 2))
    if not need_weights or weights is None:
        return out, None
    return out, Stacked(weights.mean(2) if average_attn_weights else weights)


def _projected(context: OpContext, inputs: tuple[Any, ...], weights: list[Any], bias: Any) -> tuple[Tensor, ...]:
    """Queries, keys and values, by three weights or by one that is all three."""
    query, key, value = inputs
    batched = [with_model_dim(each, context.num_models).transpose(1, 2) for each in inputs]
    if len(weights) == 1 and query is key and key is value:
        return linear(context, Stacked(batched[0]), weights[0], bias).tensor.chunk(3, -1)
    if len(weights) == 1:
        weights = list(map(Stacked, weights[0].tensor.chunk(3, 1)))
    biases = (None, None, None) if bias is None else map(Stacked, bias.tensor.chunk(3, 1))
    rows = zip(batched, weights, biases, strict=True)
    return tuple(linear(context, Stacked(x), weight, own).tensor for x, weight, own in rows)


def _joined_mask(attn_mask: Any, padding: Any, q: Tensor) -> Tensor | None:
    """Both masks as one to be added, ``(B, N or 1, heads or 1, L or 1, S)``. True means: not this one."""
    num_models, batch, heads = q.shape[:3]
    masks = []
    for mask, is_padding in ((attn_mask, False), (padding, True)):
        if mask is None:
            continue
        own = mask.tensor if isinstance(mask, Stacked) else mask.unsqueeze(0)
        if is_padding:
            own = own[:, :, None, None, :]
        else:  # (B, N*heads, L, S) or (B, L, S)
            own = own.unflatten(1, (batch, heads)) if own.ndim == 4 else own[:, None, None]
        if own.dtype == torch.bool:
            own = torch.zeros(own.shape, dtype=q.dtype, device=q.device).masked_fill_(own, -math.inf)
        masks.append(own.to(q.dtype))
    if not masks:
        return None
    joined = masks[0] if len(masks) == 1 else masks[0] + masks[1]
    return joined.expand(num_models, *joined.shape[1:])
