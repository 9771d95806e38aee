"""Schedulers of fused optimizers: torch's, with arguments that are one value, or one for each model.

Each model's rate is, to the last bit, the one that a torch scheduler of its own would set. torch's own schedulers work
on a fused optimizer too, with one argument for all models (all but
`ReduceLROnPlateau`, which reads a rate as one float).
"""

from __future__ import annotations

from hocket.fusion.lr_scheduler.base import FusedScheduler
from hocket.fusion.lr_scheduler.cosine_annealing_lr import CosineAnnealingLR
from hocket.fusion.lr_scheduler.exponential_lr import ExponentialLR
from hocket.fusion.lr_scheduler.lambda_lr import LambdaLR
from hocket.fusion.lr_scheduler.multi_step_lr import MultiStepLR
from hocket.fusion.lr_scheduler.one_cycle_lr import OneCycleLR
from hocket.fusion.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateau
from hocket.fusion.lr_scheduler.step_lr import StepLR

__all__ = [
    "CosineAnnealingLR",
    "ExponentialLR",
    "FusedScheduler",
    "LambdaLR",
    "MultiStepLR",
    "OneCycleLR",
    "ReduceLROnPlateau",
    "StepLR",
]
