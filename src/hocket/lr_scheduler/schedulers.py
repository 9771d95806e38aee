"""The schedulers of `torch.optim.lr_scheduler`, for B models. See `hocket.lr_scheduler.base`.

    >>> import torch
    >>> from hocket.optim import SGD
    >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
    >>> optimizer = SGD([weights], lr=1.0, momentum=0.9, num_models=2)
    >>> scheduler = StepLR(optimizer, step_size=[1, 2], gamma=[0.5, 0.25])
    >>> for _ in range(2):
    ...     optimizer.step(); scheduler.step(); print(scheduler.get_last_lr()[0].tolist())
    [0.5, 1.0]
    [0.25, 0.25]

A `OneCycleLR` that is over for one model keeps that model's last rate while others still have steps to go (torch, with
one model, raises). Milestones are a list for all models, or B such lists:

    >>> optimizer = SGD([weights], lr=[1.0, 2.0], num_models=2)
    >>> warm = ConstantLR(optimizer, factor=0.5, total_iters=9)
    >>> scheduler = SequentialLR(optimizer, [warm, ExponentialLR(optimizer, gamma=0.5)], milestones=[[1], [2]])
    >>> for _ in range(2):
    ...     optimizer.step(); scheduler.step(); print(scheduler.get_last_lr()[0].tolist())
    [1.0, 1.0]
    [0.5, 2.0]
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler as torch_schedulers

from hocket.errors import InputError
from hocket.lr_scheduler.arguments import for_each
from hocket.lr_scheduler.base import FusedScheduler
from hocket.optim.base import FusedOptimizer

__all__ = ["ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"]
__all__ += ["ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR"]
__all__ += ["ReduceLROnPlateau", "SequentialLR", "StepLR"]


def _of_models(torch_class: type[torch_schedulers.LRScheduler]) -> type[FusedScheduler]:
    """B of a torch scheduler, by its name, with its signature and its documentation of the arguments."""
    about = (inspect.getdoc(torch_class) or "").partition("Example")[0].rstrip()
    name = torch_class.__name__
    own = {
        "__doc__": f"`torch.optim.lr_scheduler.{name}` of B models: each argument is one value, or one for each model."
        f"\n\n{about}\n",
        "__module__": __name__,
        "torch_class": torch_class,
    }
    return type(name, (FusedScheduler,), own)


ConstantLR = _of_models(torch_schedulers.ConstantLR)
CosineAnnealingLR = _of_models(torch_schedulers.CosineAnnealingLR)
CyclicLR = _of_models(torch_schedulers.CyclicLR)
ExponentialLR = _of_models(torch_schedulers.ExponentialLR)
LambdaLR = _of_models(torch_schedulers.LambdaLR)  # a function or B; for functions by group a list of lists
LinearLR = _of_models(torch_schedulers.LinearLR)
MultiStepLR = _of_models(torch_schedulers.MultiStepLR)
MultiplicativeLR = _of_models(torch_schedulers.MultiplicativeLR)
OneCycleLR = _of_models(torch_schedulers.OneCycleLR)
PolynomialLR = _of_models(torch_schedulers.PolynomialLR)
SequentialLR = _of_models(torch_schedulers.SequentialLR)
StepLR = _of_models(torch_schedulers.StepLR)


class CosineAnnealingWarmRestarts(FusedScheduler):
    """`torch.optim.lr_scheduler.CosineAnnealingWarmRestarts` of B models (Loshchilov and Hutter: SGDR, ICLR 2017)."""

    torch_class = torch_schedulers.CosineAnnealingWarmRestarts

    def step(self, epoch: Any = None) -> None:
        """Go on to the next epoch, or to `epoch`: a number, fractions included, or B of them."""
        if epoch is None:
            super().step()
        else:
            self._advance([(each,) for each in for_each("epoch", epoch, self.optimizer.num_models)])


class ReduceLROnPlateau(FusedScheduler):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` of B models: each by its own metric.

    Example:
        >>> import torch
        >>> from hocket.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> scheduler = ReduceLROnPlateau(SGD([weights], lr=1.0, num_models=2), patience=0, factor=0.5)
        >>> for metrics in ([1.0, 1.0], [0.5, 1.0]):
        ...     scheduler.step(metrics)
        >>> scheduler.get_last_lr()[0].tolist()
        [1.0, 0.5]
    """

    torch_class = torch_schedulers.ReduceLROnPlateau

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """Look at how the models do, and lower the rates of those that have been stuck for too long.

        Args:
            metrics: one for all models, or B: a list, or a tensor of shape (B,).

        Raises:
            InputError: something else, or not B of them.
        """
        self._advance([(metric,) for metric in for_each("metrics", metrics, self.optimizer.num_models)])


class ChainedScheduler(FusedScheduler):
    """`torch.optim.lr_scheduler.ChainedScheduler` of B models: all `schedulers` step, one after another."""

    torch_class = torch_schedulers.ChainedScheduler

    def __init__(self, schedulers: Sequence[FusedScheduler], optimizer: FusedOptimizer | None = None) -> None:
        if not schedulers:
            raise InputError("schedulers: expected at least one to be chained, got none")
        super().__init__(optimizer or schedulers[0].optimizer, schedulers)
