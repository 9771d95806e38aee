"""Schedulers of fused optimizers: torch's, with arguments that are one value, or one for each model.

Each model's rate is, to the last bit, the one that a torch scheduler of its own would set. torch's own schedulers work
on a fused optimizer too, with one argument for all models (all but `ReduceLROnPlateau`, which reads a rate as one
float).

    >>> import torch
    >>> from hocket.optim import SGD
    >>> optimizer = SGD([torch.nn.Parameter(torch.ones(2, 4))], lr=[0.5, 1.0], num_models=2)
    >>> scheduler = StepLR(optimizer, step_size=1, gamma=[0.5, 0.25])
    >>> optimizer.step(); scheduler.step()
    >>> optimizer.param_groups[0]["lr"].tolist()
    [0.25, 0.25]
"""

from __future__ import annotations

from hocket.lr_scheduler import schedulers
from hocket.lr_scheduler.base import FusedScheduler
from hocket.lr_scheduler.schedulers import *  # noqa: F403 - the names that `schedulers` lists

__all__ = ["FusedScheduler", *schedulers.__all__]
