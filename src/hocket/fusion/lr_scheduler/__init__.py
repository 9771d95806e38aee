"""Schedulers of fused optimizers: torch's, with arguments that are one value, or one for each model.

Each model's rate is, to the last bit, the one that a torch scheduler of its own would set. torch's own schedulers work
on a fused optimizer too, with one argument for all models (all but
`ReduceLROnPlateau`, which reads a rate as one float).
"""

from __future__ import annotations

from hocket.fusion.lr_scheduler import schedulers
from hocket.fusion.lr_scheduler.base import FusedScheduler
from hocket.fusion.lr_scheduler.schedulers import *  # noqa: F403 - the names that `schedulers` lists

__all__ = ["FusedScheduler", *schedulers.__all__]
