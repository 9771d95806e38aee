"""Losses computed inside a model's forward: of every element, then one mean or sum for each model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.stacked import Stacked, with_model_dim

ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


def _reduced(each: Tensor, reduction: str) -> Any:
    """``(B, ...)`` by the mean, the sum or not at all."""
    if reduction == "none":
        return Stacked(each)
    flat = each.flatten(1)
    return Stacked(flat.mean(1) if reduction == "mean" else flat.sum(1))


@rule(*ELEMENTWISE)
def elementwise(context: OpContext, input: Any, target: Any, *args: Any, reduction: Any = "mean", **kwargs: Any) -> Any:
    """Input and target of one shape, without weights."""
    if args or kwargs or not isinstance(reduction, str) or tuple(input.shape) != tuple(target.shape):
        return NotImplemented
    function = getattr(functional, context.name)
    each = function(
        with_model_dim(input, context.num_models), with_model_dim(target, context.num_models), reduction="none"
    )
    return _reduced(each, reduction)


@rule("cross_entropy", "cross_entropy_loss")
def cross_entropy(context: OpContext, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Scores ``(N, classes)`` and labels ``(N,)``, without class weights."""
    ignored, reduction = kwargs.pop("ignore_index", -100), kwargs.pop("reduction", "mean")
    if args[:2] == (None, 1):  # aten's own order: weight, reduction, ignore_index
        args, ignored = (), args[2] if len(args) == 3 else ignored
    if args or any(kwargs.values()) or reduction != "mean" or input.ndim != 2 or target.ndim != 1:
        return NotImplemented
    scores, labels = with_model_dim(input, context.num_models), with_model_dim(target, context.num_models)
    each = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=ignored)
    return Stacked(each.view(labels.shape).sum(1) / (labels != ignored).sum(1))
