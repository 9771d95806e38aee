"""LambdaLR: the first rate times a function of the epoch."""

from __future__ import annotations

import types
from typing import Any

from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer
from hocket.fusion.lr_scheduler.checks import callable_
from hocket.fusion.optim.base import FusedOptimizer

__all__ = ["LambdaLR"]


class LambdaLR(FusedScheduler):
    """`torch.optim.lr_scheduler.LambdaLR` of B models: the first rate times a function of the epoch.

    Args:
        optimizer: one of `hocket.optim`.
        lr_lambda: one function, or B in a list (in torch a list is one for each group: here that is a list of lists).
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: something that cannot be called, a list of the wrong length.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, num_models=2)
        >>> scheduler = LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)])
        >>> for _ in range(2):
        ...     optimizer.step(); scheduler.step()
        >>> [round(rate, 4) for rate in scheduler.get_last_lr()[0].tolist()]
        [0.25, 0.3333]
    """

    def __init__(self, optimizer: FusedOptimizer, lr_lambda: Any, last_epoch: int = -1) -> None:
        check_optimizer(self, optimizer)
        self.lr_lambda = self.argument("lr_lambda", lr_lambda, callable_)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        return self.base_rates[group][model] * self.lr_lambda(model, group)(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As the other schedulers'; of the functions, only what objects that can be called hold, as in torch."""
        found = super().state_dict()
        found["lr_lambda"] = {
            "rows": [
                [None if isinstance(fn, types.FunctionType) else dict(vars(fn)) for fn in functions]
                for functions in self.lr_lambda.rows
            ]
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; the functions are those of the constructor."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "lr_lambda"})
        for functions, saved in zip(self.lr_lambda.rows, state_dict["lr_lambda"]["rows"], strict=True):
            for function, entries in zip(functions, saved, strict=True):
                if entries is not None:
                    vars(function).update(entries)
