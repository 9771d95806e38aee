"""MultiStepLR: a factor at given epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hocket.errors import InputError
from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer
from hocket.fusion.lr_scheduler.checks import number, whole
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import row

__all__ = ["MultiStepLR"]


class MultiStepLR(FusedScheduler):
    """`torch.optim.lr_scheduler.MultiStepLR` of B models: times `gamma` at each of the milestones.

    Args:
        optimizer: one of `hocket.optim`.
        milestones: epochs, in a list for all models; or B such lists in a list.
        gamma: one factor, or B in a list.
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: a milestone that is no whole number >= 0, a list of the wrong length.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = MultiStepLR(optimizer, milestones=[[1], [1, 2]], gamma=0.5)
        >>> for _ in range(2):
        ...     optimizer.step(); scheduler.step()
        >>> scheduler.get_last_lr()[0].tolist()
        [0.5, 0.25]
    """

    def __init__(self, optimizer: FusedOptimizer, milestones: Any, gamma: Any = 0.1, last_epoch: int = -1) -> None:
        check_optimizer(self, optimizer)
        listed = list(milestones)
        if any(isinstance(element, (list, tuple, set)) for element in listed):
            listed = [_Epochs(element) for element in row("milestones", listed, optimizer.num_models, "a list")]
            self.milestones = self.argument("milestones", listed, _milestones)
        else:
            self.milestones = self.argument("milestones", _Epochs(listed), _milestones)
        self.gamma = self.argument("gamma", gamma, number)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        milestones = self.milestones(model, group)
        return rate if epoch not in milestones else rate * self.gamma(model, group) ** milestones[epoch]


class _Epochs:
    """Milestones of one model; no list, so that nobody takes them for a list of models."""

    def __init__(self, epochs: Any) -> None:
        self.epochs = epochs


def _milestones(name: str, value: Any) -> Counter[int]:
    epochs = value.epochs if isinstance(value, _Epochs) else value
    if not isinstance(epochs, Iterable) or isinstance(epochs, (str, bytes)):
        raise InputError(f"{name}: expected epochs in a list, got {epochs!r}")
    return Counter(whole(0)(name, epoch) for epoch in epochs)
