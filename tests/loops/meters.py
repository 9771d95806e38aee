"""Loops that compute with values of their tensors and keep what comes of it: sums, means, averages, factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, loop, task, train, update

seen_loss = 0.0


@dataclass
class Progress:
    """Numbers that a trainer shows."""

    total: float = 0.0
    average: float = 0.0
    samples: int = 0


class AverageMeter:
    """The meter of torch's ImageNet example."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


@loop(planned=True)
def a_sum_before_clipping() -> Loop:
    model, optimizer, batches = task()
    progress = Progress()

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        progress.total += loss.item() * len(x)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss.detach(), "norm": norm.item()}

    return Loop(step, model, optimizer, batches, lambda: {"progress": progress})


@loop(planned=True)
def sums_in_many_places() -> Loop:
    """In a global, an attribute of a dataclass, a dict and a list."""
    global seen_loss
    seen_loss = 0.0
    model, optimizer, batches = task()
    progress, table, row = Progress(), {"loss": 0.0}, [0.0, 0]

    def step(batch):
        global seen_loss
        loss = train(model, optimizer, batch)
        value = loss.item()
        seen_loss += value
        progress.total += value * len(batch[0])
        progress.samples += len(batch[0])
        progress.average = progress.total / progress.samples
        table["loss"] = table["loss"] - value
        row[0] += -value / 3
        row[1] += 1
        return {"loss": value, "mean": progress.average, "rounded": round(value, 3), "twice": [2 * value, abs(value)]}

    def state():
        return {"progress": progress, "table": table, "row": row, "global": seen_loss}

    return Loop(step, model, optimizer, batches, state)


@loop()
def sum_before_a_step_that_raises() -> Loop:
    """Every seventeenth batch has a label that is no class: what the step has summed by then stays."""
    model, optimizer, batches = task()
    table = {"loss": 0.0, "calls": 0}

    def step(batch):
        x, y, z = batch
        first = F.cross_entropy(model(x), y)
        table["calls"] += 1
        table["loss"] += first.item()
        update(optimizer, first + F.cross_entropy(model(x), z))
        table["loss"] += 1.0
        return first

    def batch(n):
        x, y = batches[n % 10]
        return x, y, y if n % 17 != 16 else y + 4

    return Loop(step, model, optimizer, batch, lambda: table)
