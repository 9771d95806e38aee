"""ExponentialLR: a factor every epoch."""

from __future__ import annotations

from typing import Any

from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer
from hocket.fusion.lr_scheduler.checks import number
from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["ExponentialLR"]


class ExponentialLR(FusedScheduler):
    """`torch.optim.lr_scheduler.ExponentialLR` of B models: times `gamma` every epoch.

    Args:
        optimizer: one of `hocket.optim`.
        gamma: one factor, or B in a list.
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: a list of the wrong length.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=[1.0, 8.0], num_models=2)
        >>> scheduler = ExponentialLR(optimizer, gamma=[0.5, 0.25])
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()[0].tolist()
        [0.5, 2.0]
    """

    def __init__(self, optimizer: FusedOptimizer, gamma: Any, last_epoch: int = -1) -> None:
        check_optimizer(self, optimizer)
        self.gamma = self.argument("gamma", gamma, number)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        return rate if self.is_first(model) else rate * self.gamma(model, group)
