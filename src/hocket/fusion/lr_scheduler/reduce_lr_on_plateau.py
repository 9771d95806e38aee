"""ReduceLROnPlateau: a factor once a model has stopped getting better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.lr_scheduler.base import FusedScheduler, _copy, check_optimizer, read_rates, widen, write_rates
from hocket.fusion.lr_scheduler.checks import number, whole, within
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import one_of, row

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(FusedScheduler):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` of B models: each by its own metric.

    Args:
        optimizer: one of `hocket.optim`.
        mode: ``"min"`` or ``"max"``, for all models.
        factor: of the rate, below 1; one, or B in a list.
        patience, cooldown: in epochs; one, or B in a list.
        threshold, min_lr, eps: one, or B in a list (in torch a list of `min_lr` is one for each group: here that is a
            list of lists).
        threshold_mode: ``"rel"`` or ``"abs"``, for all models.

    Raises:
        InputError: numbers out of bounds, lists of the wrong length, in `step` metrics that are not one or B.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        >>> for metrics in ([1.0, 1.0], [0.5, 1.0]):
        ...     scheduler.step(metrics)
        >>> scheduler.get_last_lr()[0].tolist()
        [1.0, 0.5]
    """

    per_model = (*FusedScheduler.per_model, "best", "cooldown_counters", "num_bad_epochs")

    def __init__(
        self,
        optimizer: FusedOptimizer,
        mode: str = "min",
        factor: Any = 0.1,
        patience: Any = 10,
        threshold: Any = 1e-4,
        threshold_mode: str = "rel",
        cooldown: Any = 0,
        min_lr: Any = 0,
        eps: Any = 1e-8,
    ) -> None:
        check_optimizer(self, optimizer)
        self.mode = one_of("mode", mode, ("min", "max"))
        self.threshold_mode = one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        self.factor = self.argument("factor", factor, within(0, 1, open_above=True))
        self.patience = self.argument("patience", patience, whole(0))
        self.threshold = self.argument("threshold", threshold, number)
        self.cooldown = self.argument("cooldown", cooldown, whole(0))
        self.min_lr = self.argument("min_lr", min_lr, number)
        self.eps = self.argument("eps", eps, number)
        widen(optimizer, "lr")  # each model has a metric of its own
        models = optimizer.num_models
        self.best = [math.inf if mode == "min" else -math.inf] * models
        self.cooldown_counters = [0] * models
        self.num_bad_epochs = [0] * models
        # torch's has no first step either: nothing is known of the models yet
        self.epochs = [0] * models
        self._began = [True] * models
        self.last_epoch = 0
        self.base_rates = [read_rates(optimizer, group) for group in optimizer.param_groups]
        self._last_lr = [_copy(group["lr"]) for group in optimizer.param_groups]

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """Look at how the models do, and lower the rates of those that have been stuck for too long.

        Args:
            metrics: one for all models, or B: a list, or a tensor of shape (B,).
        """
        found = self._metrics(metrics)
        self.last_epoch += 1
        self.epochs = [epoch + 1 for epoch in self.epochs]
        stuck = [model for model, metric in enumerate(found) if self._is_stuck(model, metric)]
        if stuck:
            self.advance(stuck)
        self._last_lr = [_copy(group["lr"]) for group in self.optimizer.param_groups]

    def _metrics(self, metrics: Any) -> list[float]:
        if isinstance(metrics, torch.Tensor):
            metrics = metrics.detach().cpu()
        if isinstance(metrics, (list, tuple)) or getattr(metrics, "shape", ()) not in ((), (1,)):
            return [float(metric) for metric in row("metrics", metrics, self.optimizer.num_models)]
        try:
            return [float(metrics)] * self.optimizer.num_models
        except (TypeError, ValueError):
            raise InputError(f"metrics: expected a number, or one for each model, got {metrics!r}") from None

    def _is_stuck(self, model: int, metric: float) -> bool:
        if self._is_better(model, metric):
            self.best[model] = metric
            self.num_bad_epochs[model] = 0
        else:
            self.num_bad_epochs[model] += 1
        if self.cooldown_counters[model] > 0:
            self.cooldown_counters[model] -= 1
            self.num_bad_epochs[model] = 0
        if self.num_bad_epochs[model] <= self.patience(model):
            return False
        self.cooldown_counters[model] = self.cooldown(model)
        self.num_bad_epochs[model] = 0
        return True

    def _is_better(self, model: int, metric: float) -> bool:
        best, threshold = self.best[model], self.threshold(model)
        if self.mode == "min":
            return metric < (best * (1.0 - threshold) if self.threshold_mode == "rel" else best - threshold)
        return metric > (best * (threshold + 1.0) if self.threshold_mode == "rel" else best + threshold)

    def advance(self, models: Sequence[int]) -> None:
        for place, group in enumerate(self.optimizer.param_groups):
            rates = read_rates(self.optimizer, group)
            new = list(rates)
            for model in models:
                new[model] = self.next_rate(model, place, self.epochs[model], rates[model])
            write_rates(self.optimizer, group, rates, new)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        lower = max(rate * self.factor(model, group), self.min_lr(model, group))
        return lower if rate - lower > self.eps(model, group) else rate

    def refill(self, model: int, lr: float | None = None, **arguments: Any) -> None:
        """Forget what was known of one slot; `lr` and `arguments` as in `FusedScheduler.refill`."""
        slot = self.optimizer.checked_model(model)
        self.set_arguments(slot, arguments)
        for number_, group in enumerate(self.optimizer.param_groups):
            if lr is not None:
                self.optimizer.set_for_model(group, "lr", slot, lr)
            self.base_rates[number_][slot] = read_rates(self.optimizer, group)[slot]
        self.best[slot] = math.inf if self.mode == "min" else -math.inf
        self.cooldown_counters[slot] = self.num_bad_epochs[slot] = self.epochs[slot] = 0
        self._last_lr = [_copy(group["lr"]) for group in self.optimizer.param_groups]
