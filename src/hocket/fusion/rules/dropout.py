"""Dropout: a rate and, where seeds were given, a generator for each model.

With seeds, every model draws exactly what the plain model draws after ``torch.manual_seed(seed)``: the same kernel,
from a generator in the same state. Without, one draw serves all models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.errors import InputError
from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import ModelValues, Stacked, with_model_dim

ALPHA = 1.7580993408473766  # of self-normalising networks, as torch has it


def drawn(context: OpContext, noise: Tensor, keep: list[float]) -> Tensor:
    """Write zeros and ones into `noise`, ``(B, ...)``, each one with the chance `keep` of its model."""
    if context.generators:
        for own, chance, generator in zip(noise.unbind(0), keep, context.generators, strict=True):
            if 0.0 < chance < 1.0:  # else torch draws nothing either
                own.bernoulli_(chance, generator=generator)
            else:
                own.fill_(chance)
        return noise
    if len(set(keep)) == 1:
        return noise.bernoulli_(keep[0])
    chances = torch.tensor(keep, dtype=noise.dtype, device=noise.device)
    return noise.copy_(torch.rand_like(noise) < chances.reshape(-1, *([1] * (noise.ndim - 1))))


def rates_of(context: OpContext, rate: Any) -> list[float]:
    """A rate for all models, or one for each, as one for each."""
    return list(rate.values) if isinstance(rate, ModelValues) else [rate] * context.num_models


def _per_model(values: list[float], like: Tensor) -> Any:
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, *([1] * (like.ndim - 1)))


def dropped(
    context: OpContext, input: Any, rates: list[float], *, whole_channels: bool = False, alpha: bool = False
) -> Any:
    """Apply dropout with B rates, to whole channels ``(N, C, 1, ...)`` or keeping mean and variance (alpha)."""
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise InputError(f"{context.where}: expected dropout rates from 0 to 1, got {rates}")
    x = with_model_dim(input, context.num_models)
    keep = [1.0 - rate for rate in rates]
    noise = x.new_empty((*x.shape[:3], *([1] * (x.ndim - 3)))) if whole_channels else torch.empty_like(x)
    drawn(context, noise, keep)
    if not alpha:
        scale = _per_model([chance or 1.0 for chance in keep], x)
        return Stacked(x * noise.div_(scale))
    a = [1.0 / ((ALPHA * ALPHA * rate + 1.0) * (1.0 - rate)) ** 0.5 if rate < 1.0 else 0.0 for rate in rates]
    shift = noise.sub(1.0).mul_(_per_model([ALPHA * each for each in a], x))
    shift = shift.add_(_per_model([ALPHA * each * rate for each, rate in zip(a, rates, strict=True)], x))
    return Stacked(x * noise.mul_(_per_model(a, x)) + shift)


CHANNELS = {"dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"}


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def dropout(
    context: OpContext, input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False, **named: Any
) -> Any:
    """A rate for all models, or one for each."""
    training = named.get("train", training)
    if isinstance(training, ModelValues) or isinstance(inplace, ModelValues):
        return NotImplemented
    name = context.name
    if not training:
        return input
    whole = name in CHANNELS
    if whole and input.ndim < 3:
        return NotImplemented  # torch's own special cases for examples without a batch
    return dropped(context, input, rates_of(context, p), whole_channels=whole, alpha="alpha" in name)
