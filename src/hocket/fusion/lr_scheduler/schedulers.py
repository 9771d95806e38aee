"""The schedulers of `torch.optim.lr_scheduler`, for B models; see `hocket.fusion.lr_scheduler.base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler as torch_schedulers

from hocket.errors import InputError
from hocket.fusion.lr_scheduler.base import FusedScheduler
from hocket.fusion.lr_scheduler.shadows import KEYS
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import row

__all__ = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
]


class StepLR(FusedScheduler):
    """`torch.optim.lr_scheduler.StepLR` of B models: times `gamma` every `step_size` epochs.

    Example:
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = StepLR(optimizer, step_size=[1, 2], gamma=[0.5, 0.25])
        >>> for _ in range(2):
        ...     optimizer.step(); scheduler.step(); print(scheduler.get_last_lr()[0].tolist())
        [0.5, 1.0]
        [0.25, 0.25]
    """

    torch_class = torch_schedulers.StepLR


class MultiStepLR(FusedScheduler):
    """`torch.optim.lr_scheduler.MultiStepLR` of B models; `milestones` is a list for all models, or B such lists."""

    torch_class = torch_schedulers.MultiStepLR


class ExponentialLR(FusedScheduler):
    """`torch.optim.lr_scheduler.ExponentialLR` of B models: times `gamma` every epoch."""

    torch_class = torch_schedulers.ExponentialLR


class ConstantLR(FusedScheduler):
    """`torch.optim.lr_scheduler.ConstantLR` of B models: times `factor` for the first `total_iters` epochs."""

    torch_class = torch_schedulers.ConstantLR


class LinearLR(FusedScheduler):
    """`torch.optim.lr_scheduler.LinearLR` of B models: a factor that changes linearly for `total_iters` epochs."""

    torch_class = torch_schedulers.LinearLR


class PolynomialLR(FusedScheduler):
    """`torch.optim.lr_scheduler.PolynomialLR` of B models: down to 0 in `total_iters` epochs."""

    torch_class = torch_schedulers.PolynomialLR


class CosineAnnealingLR(FusedScheduler):
    """`torch.optim.lr_scheduler.CosineAnnealingLR` of B models (SGDR, ICLR 2017, without restarts)."""

    torch_class = torch_schedulers.CosineAnnealingLR


class CosineAnnealingWarmRestarts(FusedScheduler):
    """`torch.optim.lr_scheduler.CosineAnnealingWarmRestarts` of B models (Loshchilov and Hutter: SGDR, ICLR 2017)."""

    torch_class = torch_schedulers.CosineAnnealingWarmRestarts

    def step(self, epoch: Any = None) -> None:
        """Go on to the next epoch, or to `epoch`: a number, fractions included, or B of them."""
        if epoch is None:
            super().step()
        else:
            self._advance([(each,) for each in _each("epoch", epoch, self.optimizer.num_models)])


class LambdaLR(FusedScheduler):
    """`torch.optim.lr_scheduler.LambdaLR` of B models: the first rate times a function of the epoch, one or B.

    In torch a list of functions is one for each group: here that is a list of lists.
    """

    torch_class = torch_schedulers.LambdaLR


class MultiplicativeLR(FusedScheduler):
    """`torch.optim.lr_scheduler.MultiplicativeLR` of B models: each rate times a function of the epoch, one or B."""

    torch_class = torch_schedulers.MultiplicativeLR


class CyclicLR(FusedScheduler):
    """`torch.optim.lr_scheduler.CyclicLR` of B models (Smith, arXiv 1506.01186), which cycles momentum or betas too."""

    torch_class: ClassVar[type[torch_schedulers.LRScheduler]] = torch_schedulers.CyclicLR
    keys = KEYS

    def _check_arguments(self) -> None:
        cycles = any(flag for flags in self.arguments["cycle_momentum"] for flag in flags)
        if cycles and not {"momentum", "betas"} & set(self.optimizer.bounds):
            raise InputError(
                "cycle_momentum: expected an optimizer with a momentum or betas, got "
                f"{type(self.optimizer).__name__}; pass cycle_momentum=False"
            )


class OneCycleLR(CyclicLR):
    """`torch.optim.lr_scheduler.OneCycleLR` of B models (Smith and Topin, arXiv 1708.07120).

    A model whose cycle is over keeps its last rate while others still have steps to go (torch, with one model, raises).

    Example:
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, momentum=0.9, num_models=2)
        >>> scheduler = OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=10, div_factor=4, pct_start=0.2)
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()[0].tolist()
        [1.0, 2.0]
    """

    torch_class = torch_schedulers.OneCycleLR

    def _check_arguments(self) -> None:
        super()._check_arguments()
        total, epochs, each = (self.arguments[name] for name in ("total_steps", "epochs", "steps_per_epoch"))
        known = [None not in pair for pair in zip(*map(_flat, (epochs, each)), strict=True)]
        if any(steps is None and not other for steps, other in zip(_flat(total), known, strict=True)):
            raise InputError("total_steps: expected it, or both epochs and steps_per_epoch")

    def _is_over(self, cell: Any) -> bool:
        return cell.last_epoch >= cell.total_steps


class ReduceLROnPlateau(FusedScheduler):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` of B models: each by its own metric.

    Example:
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> scheduler = ReduceLROnPlateau(SGD([weights], lr=1.0, num_models=2), patience=0, factor=0.5)
        >>> for metrics in ([1.0, 1.0], [0.5, 1.0]):
        ...     scheduler.step(metrics)
        >>> scheduler.get_last_lr()[0].tolist()
        [1.0, 0.5]
    """

    torch_class = torch_schedulers.ReduceLROnPlateau

    def __init__(self, optimizer: FusedOptimizer, *arguments: Any, **named: Any) -> None:
        super().__init__(optimizer, *arguments, **named)
        self._widen()  # each model has a metric of its own
        self._last_lr = self._rates()

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """Look at how the models do, and lower the rates of those that have been stuck for too long.

        Args:
            metrics: one for all models, or B: a list, or a tensor of shape (B,).

        Raises:
            InputError: something else, or not B of them.
        """
        self._advance([(metric,) for metric in _each("metrics", metrics, self.optimizer.num_models)])


class SequentialLR(FusedScheduler):
    """`torch.optim.lr_scheduler.SequentialLR` of B models; `milestones` is a list for all models, or B such lists.

    Example:
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=[1.0, 2.0], num_models=2)
        >>> warm = ConstantLR(optimizer, factor=0.5, total_iters=9)
        >>> scheduler = SequentialLR(optimizer, [warm, ExponentialLR(optimizer, gamma=0.5)], milestones=[[1], [2]])
        >>> for _ in range(2):
        ...     optimizer.step(); scheduler.step(); print(scheduler.get_last_lr()[0].tolist())
        [1.0, 1.0]
        [0.5, 2.0]
    """

    torch_class = torch_schedulers.SequentialLR
    keys = KEYS


class ChainedScheduler(FusedScheduler):
    """`torch.optim.lr_scheduler.ChainedScheduler` of B models: all `schedulers` step, one after another."""

    torch_class = torch_schedulers.ChainedScheduler
    keys = KEYS

    def __init__(self, schedulers: Sequence[FusedScheduler], optimizer: FusedOptimizer | None = None) -> None:
        if not schedulers:
            raise InputError("schedulers: expected at least one to be chained, got none")
        super().__init__(optimizer or schedulers[0].optimizer, schedulers)


def _flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row_ in rows for value in row_]


def _each(name: str, value: Any, num_models: int) -> list[float]:
    """One number for all models, or B of them, as B floats."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (list, tuple)) or getattr(value, "shape", ()) not in ((), (1,)):
        return [float(each) for each in row(name, value, num_models)]
    try:
        return [float(value)] * num_models
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a number, or one for each model, got {value!r}") from None
