"""CosineAnnealingLR (Loshchilov and Hutter: "SGDR", ICLR 2017, without restarts)."""

from __future__ import annotations

import math
from typing import Any

from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer
from hocket.fusion.lr_scheduler.checks import number, whole
from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["CosineAnnealingLR"]


class CosineAnnealingLR(FusedScheduler):
    """`torch.optim.lr_scheduler.CosineAnnealingLR` of B models, by its recursive formula.

    Args:
        optimizer: one of `hocket.optim`.
        T_max: epochs from the first rate to the least; one, or B in a list.
        eta_min: the least rate; one, or B in a list.
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: `T_max` below 1, a list of the wrong length.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = CosineAnnealingLR(optimizer, T_max=[1, 2])
        >>> optimizer.step(); scheduler.step()
        >>> [round(rate, 4) for rate in scheduler.get_last_lr()[0].tolist()]
        [0.0, 0.5]
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        T_max: Any,  # noqa: N803 - torch's name
        eta_min: Any = 0.0,
        last_epoch: int = -1,
    ) -> None:
        check_optimizer(self, optimizer)
        self.T_max = self.argument("T_max", T_max, whole(1))
        self.eta_min = self.argument("eta_min", eta_min, number)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        period, least, base = self.T_max(model, group), self.eta_min(model, group), self.base_rates[group][model]
        if self.is_first(model):
            return rate
        if (epoch - 1 - period) % (2 * period) == 0:
            return rate + (base - least) * (1 - math.cos(math.pi / period)) / 2
        now, before = (1 + math.cos(math.pi * at / period) for at in (epoch, epoch - 1))
        return now / before * (rate - least) + least
