"""StepLR: a factor every so many epochs."""

from __future__ import annotations

from typing import Any

from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer
from hocket.fusion.lr_scheduler.checks import number, whole
from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["StepLR"]


class StepLR(FusedScheduler):
    """`torch.optim.lr_scheduler.StepLR` of B models: times `gamma` every `step_size` epochs.

    Args:
        optimizer: one of `hocket.optim`.
        step_size: in epochs; one, or B in a list.
        gamma: one factor, or B in a list.
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: a step size below 1, a list of the wrong length.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = StepLR(optimizer, step_size=[1, 2], gamma=[0.5, 0.25])
        >>> for _ in range(2):
        ...     optimizer.step(); scheduler.step(); print(scheduler.get_last_lr()[0].tolist())
        [0.5, 1.0]
        [0.25, 0.25]
    """

    def __init__(self, optimizer: FusedOptimizer, step_size: Any, gamma: Any = 0.1, last_epoch: int = -1) -> None:
        check_optimizer(self, optimizer)
        self.step_size = self.argument("step_size", step_size, whole(1))
        self.gamma = self.argument("gamma", gamma, number)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        if epoch == 0 or epoch % self.step_size(model, group) != 0:
            return rate
        return rate * self.gamma(model, group)
