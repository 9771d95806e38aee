"""Embeddings: the tables of all models stand one after another, and model i's indices move by i times the rows.

table_i (V, D)   ->  table (B*V, D)
index_i          ->  index + i*V
padding_idx      ->  one row in every model's part: its rows get no gradient
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hocket.errors import InputError
from hocket.fusion.rules.base import OpContext, is_watched, rule
from hocket.fusion.stacked import Stacked, with_model_dim


def _check(context: OpContext, indices: Any) -> None:
    tensor = indices.tensor if isinstance(indices, Stacked) else indices
    if tensor.is_floating_point():
        raise InputError(f"{context.where}: expected indices (int64), got {tensor.dtype}")


@rule("embedding")
def embedding(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """``F.embedding`` takes indices first, ``aten.embedding`` the table."""
    names = ["weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"]
    if context.target is functional.embedding:
        names = ["input", "weight", "padding_idx", "max_norm", "norm_type", *names[3:]]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    indices: Any = given.get("input", given.get("indices"))
    weight = given["weight"]
    _check(context, indices)
    if given.get("sparse"):
        raise InputError(f"{context.where}: sparse gradients cannot be fused; expected sparse=False")
    if not isinstance(weight, Stacked):
        return Stacked(functional.embedding(indices.tensor, weight))
    num_rows = weight.shape[0]
    moved = with_model_dim(indices, context.num_models)
    in_table = _within(context, moved, num_rows)
    max_norm, norm_type = given.get("max_norm"), given.get("norm_type", 2.0)
    by_freq = given.get("scale_grad_by_freq", False)
    y = functional.embedding(in_table, weight.tensor.flatten(0, 1), None, max_norm, norm_type, by_freq)
    padding_idx = given.get("padding_idx")
    if padding_idx is not None and (padding_idx >= 0 or context.target is functional.embedding):
        is_padding = (moved == padding_idx % num_rows).unsqueeze(-1)
        y = torch.where(is_padding, y.detach(), y)
    return Stacked(y)


def _within(context: OpContext, indices: Tensor, num_rows: int) -> Tensor:
    """``(B, ...)`` indices into the common table. One out of range would read a neighbour's row, so none passes."""
    if (
        indices.device.type == "cpu"
        and indices.numel()
        and not (is_watched() or indices.is_meta or type(indices) is not Tensor)
    ):
        lowest, highest = torch.aminmax(indices)
        if lowest < 0 or highest >= num_rows:
            raise InputError(
                f"{context.where}: expected indices from 0 to {num_rows - 1}, got {int(lowest)} to {int(highest)}"
            )
    else:  # where looking costs a synchronisation: a wrong index goes far beyond the table and fails there
        is_wrong = (indices < 0) | (indices >= num_rows)
        indices = indices.masked_fill(is_wrong, 2**31)
    num_models = indices.shape[0]
    first_rows = torch.arange(num_models, device=indices.device, dtype=indices.dtype) * num_rows
    return indices + first_rows.reshape(-1, *([1] * (indices.ndim - 1)))


@rule("embedding_bag")
def embedding_bag(context: OpContext, *args: Any, **kwargs: Any) -> Any:
    """Bags of equal length, ``(N, L)``. Bags given by offsets, or with padding, go model by model."""
    if context.target is not functional.embedding_bag:
        return NotImplemented
    given = inspect.signature(functional.embedding_bag).bind(*args, **kwargs).arguments
    indices, weight, weights = given.pop("input"), given.pop("weight"), given.pop("per_sample_weights", None)
    if indices.ndim != 2 or not isinstance(weight, Stacked):
        return NotImplemented
    # By frequency, torch takes counts of other indices than a bag's, so what is right follows from the order of all.
    if given.get("sparse") or given.get("scale_grad_by_freq"):
        return NotImplemented
    if any(given.get(name) is not None for name in ("offsets", "padding_idx")):
        return NotImplemented
    _check(context, indices)
    bags = _within(context, with_model_dim(indices, context.num_models), weight.shape[0]).flatten(0, 1)
    if weights is not None:
        weights = with_model_dim(weights, context.num_models).flatten(0, 1)
    y = functional.embedding_bag(bags, weight.tensor.flatten(0, 1), per_sample_weights=weights, **given)
    return Stacked(y.unflatten(0, (context.num_models, -1)))
