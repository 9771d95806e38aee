"""Loops that compute with values of their tensors and keep what comes of it: sums, means, averages, factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loops.loop import Loop, loop, task, update

seen_loss = 0.0


@dataclass
class Progress:
    """What a trainer shows."""

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
def meter_of_numbers() -> Loop:
    model, optimizer, batches = task()
    losses, scores = AverageMeter(), AverageMeter()

    def step(batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        losses.update(loss.item(), batch[0].size(0))
        scores.update((out.argmax(1) == batch[1]).float().mean().item(), batch[0].size(0))
        update(optimizer, loss)
        return losses.avg

    return Loop(step, model, optimizer, batches, lambda: {"losses": vars(losses), "scores": vars(scores)})


@loop(planned=True)
def sums_in_many_places() -> Loop:
    """In a global, an attribute of a dataclass, a dict and a list."""
    global seen_loss
    seen_loss = 0.0
    model, optimizer, batches = task()
    progress, table, row = Progress(), {"loss": 0.0}, [0.0, 0]

    def step(batch):
        global seen_loss
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss)
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


@loop(planned=True)
def moving_average_of_the_loss() -> Loop:
    model, optimizer, batches = task()
    table, smooth = {"average": 0.0, "steps": 0}, []

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss)
        table["average"] = 0.9 * table["average"] + 0.1 * loss.item()
        table["steps"] += 1
        smooth.append(table["average"] / (1 - 0.9 ** table["steps"]))
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"table": table, "smooth": smooth})


@loop(planned=True)
def temperature_as_a_number() -> Loop:
    """As in soft actor-critic: a learnt temperature enters the next step's loss as a number."""
    model, optimizer, batches = task()
    log_alpha = torch.zeros((), requires_grad=True)
    of_alpha = torch.optim.SGD([log_alpha], lr=0.1)
    agent = {"alpha": 1.0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss * agent["alpha"])
        update(of_alpha, -(log_alpha * (loss.detach() - 1)))
        agent["alpha"] = log_alpha.exp().item()
        return loss

    return Loop(step, model, [optimizer, of_alpha], batches, lambda: {"agent": agent, "log_alpha": log_alpha})


@loop(planned=True)
def norm_of_gradients_logged() -> Loop:
    model, optimizer, batches = task()
    log = {"norm": 0.0, "sum": 0.0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        log.update(norm=norm, sum=log["sum"] + norm)
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, batches, lambda: log)


@loop(planned=True)
def best_so_far() -> Loop:
    """A branch on the value of the loss."""
    model, optimizer, batches = task()
    best = {"loss": 9.0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss)
        if loss.item() < best["loss"]:
            best["loss"] = loss.item()
        return loss

    return Loop(step, model, optimizer, batches, lambda: best)


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


@loop(planned=True)
def sum_after_a_step_that_raises() -> Loop:
    model, optimizer, batches = task()
    table = {"loss": 0.0, "calls": 0}

    def step(batch):
        optimizer.zero_grad()
        table["calls"] += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        table["loss"] += loss.item()
        return loss

    def batch(n):
        x, y = batches[n % 10]
        return x, y if n % 17 != 16 else y + 4

    return Loop(step, model, optimizer, batch, lambda: table)
