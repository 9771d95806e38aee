"""The training step that most tests take: forward, loss, backward, update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Take a step along the gradients of a loss, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy,
) -> Callable[[Any], torch.Tensor]:
    """A step on batches of inputs and targets; it returns its loss."""

    def step(batch: Any) -> torch.Tensor:
        return update(optimizer, loss_fn(model(batch[0]), batch[1]))

    return step
