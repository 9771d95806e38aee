"""Optimizers by name, initial weights, and the two training steps that most entries share."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo.base import Request

DEFAULT_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}

Batch = tuple[Tensor, Tensor]


def make_optimizer(
    name: str, lr: float, parameters: Iterable[nn.Parameter], *, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Make the optimizer ``name`` over ``parameters``.

    ``sgd`` is the recipe of the CIFAR and ImageNet papers (He et al., 2015): momentum 0.9, weight decay 1e-4. ``adam``
    (Kingma & Ba, 2014) and ``adamw`` (Loshchilov & Hutter, 2017) keep PyTorch's defaults, except for ``betas``.

    make_optimizer("adam", 2e-4, model.parameters(), betas=(0.5, 0.999))
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, lr=lr, betas=betas)


def default_lr(name: str) -> float:
    """Return the learning rate for ``name``, used if it is not the entry's optimizer."""
    if name not in DEFAULT_LR:
        raise InputError(f"optimizer: expected one of {', '.join(DEFAULT_LR)}, got {name!r}")
    return DEFAULT_LR[name]


def checked_lr(lr: float) -> float:
    """Return ``lr``, or raise an `InputError` if it is no positive, finite number."""
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not (math.isfinite(lr) and lr > 0):
        raise InputError(f"lr: expected a positive number, got {lr!r}")
    return lr


def initialised(model: nn.Sequential) -> nn.Sequential:
    """Initialise the weights of layers that are followed by ReLU, so that a deep model learns too.

    Source: K. He et al., "Delving Deep into Rectifiers", 2015.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def classifier_job(request: Request, model: nn.Module, batches: list[Batch]) -> Job:
    """Train ``model`` to predict the label of each input, by cross-entropy.

    ``batches`` hold inputs ``[batch, ...]`` and labels ``[batch]``. The model returns scores ``[batch, classes]``.
    """
    model.to(request.device)
    optimizer = request.optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, batches, name=request.name)


def language_job(request: Request, model: nn.Module, batches: list[Batch], max_norm: float | None = None) -> Job:
    """Train ``model`` to predict the next token at each position, by cross-entropy.

    ``batches`` hold tokens and targets, both ``[batch, steps]``. The model returns scores ``[batch, steps, vocab]``.
    Gradients are clipped to a total norm of `max_norm` if given.
    """
    model.to(request.device)
    optimizer = request.optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss

    return Job(step, model, optimizer, batches, name=request.name)
