"""The training step of every classifier in the zoo, and initial weights for the small ones."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from hocket.job import Job
from hocket.zoo.base import Request

Batch = tuple[Tensor, Tensor]


def initialised(model: nn.Sequential) -> nn.Sequential:
    """``model`` with weights for layers that are followed by ReLU, so that a deep one learns too.

    Source: K. He et al., "Delving Deep into Rectifiers", 2015.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def job(request: Request, model: nn.Module, batches: list[Batch]) -> Job:
    """Train ``model`` to tell the label of each input, by cross-entropy.

    ``batches`` hold inputs ``[batch, ...]`` and labels ``[batch]``; the model answers ``[batch, classes]``.
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
