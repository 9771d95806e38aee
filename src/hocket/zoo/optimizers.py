"""The optimizers that a zoo entry may be trained with, by name.

``sgd`` is the recipe of the CIFAR and ImageNet papers (He et al., 2015): momentum 0.9, weight decay 1e-4.
``adam`` (Kingma & Ba, 2014) and ``adamw`` (Loshchilov & Hutter, 2017) keep PyTorch's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hocket.errors import InputError

DEFAULT_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}


def make(
    name: str,
    lr: float,
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """The optimizer ``name`` over ``parameters``; ``betas``, the decay of the two moments, are only for Adam.

    make("adam", 2e-4, model.parameters(), betas=(0.5, 0.999))
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, betas=betas)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=betas)
    raise _unknown(name)


def default_lr(name: str) -> float:
    """The learning rate for ``name`` where the entry has none of its own for it."""
    if name not in DEFAULT_LR:
        raise _unknown(name)
    return DEFAULT_LR[name]


def checked_lr(lr: float) -> float:
    """``lr``, or an error: a rate is a positive, finite number."""
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not (math.isfinite(lr) and lr > 0):
        raise InputError(f"lr: expected a positive number, got {lr!r}")
    return lr


def _unknown(name: object) -> InputError:
    return InputError(f"optimizer: expected one of {', '.join(DEFAULT_LR)}, got {name!r}")
