"""Steps whose loss depends on the batch as a body says, and their batches."""

from __future__ import annotations

import torch

from equivalence.test_steps import adam, mlp
from hocket.job import Job
from support.steps import update


def job_of(body, batches, model=None) -> Job:
    """A step whose loss is ``body(model, batch)``."""
    model = model or mlp()
    optimizer = adam(model)

    def step(batch):
        return update(optimizer, body(model, batch))

    return Job(step, model, optimizer, batches)


def batch_of(seed: int, **further):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 6, generator=generator)
    return {"inputs": inputs, "targets": torch.randn(4, 3, generator=generator)} | further


def loss_of(model, batch):
    return (model(batch["inputs"]) - batch["targets"]).square().mean()


def scaled(factor):
    """A body: the loss times what `factor` makes of the batch."""
    return lambda model, batch: loss_of(model, batch) * factor(batch)


def mask(*, hole: bool) -> torch.Tensor:
    ones = torch.ones(4, 6, dtype=torch.int64)
    if hole:
        ones[:, -1] = 0
    return ones
