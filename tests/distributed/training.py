"""Jobs that ranks train, and one process that trains the same: all workers' batches as micro-batches of a step."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer imports it (4 s); the process that ranks are forked from has it then
from torch import nn

import hocket
from hocket import distribute


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: bool = False

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
}


class Net(nn.Module):
    """Layers of unequal size; a batch norm; a tied weight."""

    def __init__(self, width: int = 300, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)  # before the norm its gradient is rounding; Adam makes steps of it
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.middle.weight
        self.last = nn.Linear(width, 2)
        self.to(dtype)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.tied(torch.tanh(self.middle(x)))))


def training(optimizer: str = "sgd", *, clip: bool = False, width: int = 300, dtype=torch.float64) -> Training:
    torch.manual_seed(3)
    model = Net(width, dtype)
    return Training(model, OPTIMIZERS[optimizer](model.parameters()), clip)


def batches(worker: int, count: int, dtype=torch.float64) -> list:
    generator = torch.Generator().manual_seed(100 + worker)
    return [
        (torch.randn(6, 8, generator=generator).to(dtype), torch.randn(6, 2, generator=generator).to(dtype))
        for _ in range(count)
    ]


def together(
    of: Training, workers: int, count: int, scheduler: Any = None, alone: Collection[int] = ()
) -> list[list[float]]:
    """Train in one process; the losses of each worker's micro-batches. Buffers are those of worker 0.

    In the steps of `alone` there are only those of worker 0.
    """
    found: list[list[float]] = [[] for _ in range(workers)]
    of_worker = [batches(worker, count) for worker in range(workers)]
    for step in range(count):
        before = {name: value.clone() for name, value in of.model.named_buffers()}
        of.optimizer.zero_grad()
        there = 1 if step in alone else workers
        for worker in reversed(range(there)):
            for name, value in of.model.named_buffers():
                value.copy_(before[name])
            x, y = of_worker[worker][step]
            loss = nn.functional.mse_loss(of.model(x), y)
            (loss / there).backward()
            found[worker].append(loss.item())
        if of.clip:
            nn.utils.clip_grad_norm_(of.model.parameters(), 0.05)
        of.optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def tensors_of(of: Training) -> dict[str, Any]:
    """All of a checkpoint, as arrays (tensors would be shared, with a process that ends)."""
    model = {name: value.cpu().numpy().copy() for name, value in of.model.state_dict().items()}
    state = of.optimizer.state_dict()["state"]
    return model | {f"{n}.{key}": v.cpu().numpy().copy() for n, values in state.items() for key, v in values.items()}


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two checkpoints, but for rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(found[name], value, rtol=1e-12, atol=1e-12), name


def check_as_together(found: dict[str, Any], of: Training, *given: Any, **options: Any) -> list[list[float]]:
    """A checkpoint is that of `together`; returns its losses."""
    losses = together(of, *given, **options)
    assert_near(found, tensors_of(of))
    return losses


def rank_of_job(rank, say, servers, steps, optimizer="sgd", clip=False, order="auto", executor="python", rates=False):
    """A rank of a whole job; a worker returns losses, orders of arrival, and (rank 0) the checkpoint."""
    import os

    workers = int(os.environ["WORLD_SIZE"]) - servers
    of = training(optimizer, clip=clip)
    settings = {"num_servers": servers, "timeout_s": 60.0, "executor": executor}
    if rank >= workers:
        with torch.no_grad():
            for parameter in of.model.parameters():
                parameter.add_(1.0)  # what rank 0 has counts
        return distribute.server(of.step, of.model, of.optimizer, batches(0, 1)[0], **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(of.optimizer, 5, 0.7) if rates else None
    losses, orders = [], []
    with distribute.worker(of.step, of.model, of.optimizer, order=order, **settings) as fast:
        for batch in batches(rank, steps):
            losses.append(fast(batch).item())
            orders.append(fast.arrivals())
            if scheduler is not None:
                scheduler.step()
        fast.gather()
        plan = str(fast.plan)
    assert isinstance(fast.plan, hocket.Plan)
    return losses, orders, plan, tensors_of(of)
