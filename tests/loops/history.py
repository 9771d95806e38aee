"""Loops whose step writes down what happens: losses, metrics, messages; and steps that read it back."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loops.loop import Loop, classifier, loop, mlp, train, update


@loop(word="recent")
def recent_losses_that_skip_outliers(model, optimizer, batches) -> Loop:
    batches[3] = (30 * batches[3][0], batches[3][1])
    recent = deque(maxlen=20)

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        value = loss.item()
        if len(recent) == recent.maxlen and value > 2 * sum(recent) / len(recent):
            return loss
        recent.append(value)
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches, lambda: {"recent": recent})


@loop(planned=True)
def tables_returned_and_written_outside(model, optimizer, batches) -> Loop:
    """The step returns a dict and a list of its own, and the loop writes into what it is given."""
    settings, seen = {"scale": 1.0, "steps": 0}, [0.5]
    same = []

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) * settings["scale"] + seen[0]
        settings["steps"] += 1
        update(optimizer, loss)
        return {"settings": settings, "seen": (seen, loss)}

    def after(n, result):
        same.append((result["settings"] is settings, result["seen"][0] is seen))
        result["settings"]["scale"] = 1.0 + n / 100
        result["seen"][0][0] = n / 10

    return Loop(step, model, optimizer, batches, lambda: {"settings": settings, "seen": seen, "same": same}, after)


@loop(planned=True)
def rows_of_numbers_and_tensors(model, optimizer, batches) -> Loop:
    rows = []

    def step(batch):
        loss = train(model, optimizer, batch)
        rows.append((loss.item(), loss.detach().expand(3)))
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"rows": rows})


@loop(planned=True)
def total_of_tensors(model, optimizer, batches) -> Loop:
    total = torch.zeros(())

    def step(batch):
        nonlocal total
        loss = train(model, optimizer, batch)
        total = total + loss.detach()
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"total": total})


@loop(word=".item() may be")
def losses_read_between_steps(model, optimizer, batches) -> Loop:
    """``max`` of an empty list raises: the code between steps relies on what the step wrote."""
    losses, worst = [], []

    def step(batch):
        loss = train(model, optimizer, batch)
        losses.append(float(loss.detach()))
        return loss

    def after(*_):
        worst.append(max(losses))
        losses.clear()

    return Loop(step, model, optimizer, batches, lambda: {"losses": losses, "worst": worst}, after)


@loop(planned=True)
def failures_swallowed(model, optimizer, batches) -> Loop:
    """A blind `except` must not hide from the step that it is traced."""
    failures = []

    def step(batch):
        loss = train(model, optimizer, batch)
        try:
            return float(loss.detach())
        except Exception as error:  # noqa: BLE001
            failures.append(repr(error))
            return None

    return Loop(step, model, optimizer, batches, lambda: {"failures": failures})


@loop()
def best_weights_kept(model, optimizer, batches) -> Loop:
    best = {"loss": float("inf"), "weights": None}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if loss.item() < best["loss"]:
            best["loss"] = loss.item()
            best["weights"] = copy.deepcopy(model.state_dict())
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches, lambda: best)


seen_loss = 0.0


@dataclass
class Progress:
    """Numbers that a trainer shows."""

    total: float = 0.0
    average: float = 0.0
    samples: int = 0


@loop(planned=True)
def sums_in_many_places(model, optimizer, batches) -> Loop:
    """In a global, an attribute of a dataclass, a dict and a list."""
    global seen_loss
    seen_loss = 0.0
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


@loop(planned=True)
def history_of_every_fifth_step(model, optimizer, batches) -> Loop:
    """Another update, and what is noted of it, come every fifth step only."""
    critic = mlp(outputs=1)
    rate = torch.optim.SGD(critic.parameters(), lr=0.01)
    log = defaultdict(list)
    calls = [0]

    def step(batch):
        calls[0] += 1
        loss = train(model, optimizer, batch)
        log["loss"].append(loss.item())
        if calls[0] % 5 == 0:
            score = update(rate, critic(batch[0]).pow(2).mean())
            log["score"].append(score.item())
        if calls[0] % 10 == 0:
            print(calls[0], log["loss"][-1], log["score"][-1])

    return Loop(step, [model, critic], [optimizer, rate], batches, lambda: {"log": log})


@loop(planned=True)
def list_that_the_loop_around_the_step_fills(model, optimizer, batches) -> Loop:
    class Trainer:
        def __init__(self):
            self.seen, self.losses = [], []

        def step(self, batch):
            loss = train(model, optimizer, batch)
            self.losses.append(loss.item())
            return loss

    trainer = Trainer()

    def batch(n):
        trainer.seen.append(n)
        return batches[n % 10]

    return Loop(trainer.step, model, optimizer, batch, lambda: {"seen": trainer.seen, "losses": trainer.losses})


@loop(planned=True)
def heads_that_are_added_and_summed(model, optimizer, batches) -> Loop:
    """A list that has grown between steps, and is read."""
    scales = [1.0]

    def step(batch):
        loss = classifier(model, batch)
        for scale in scales:
            loss = loss * scale
        return update(optimizer, loss)

    def batch(n):
        if n in (20, 50):
            scales.append(1.0 + n / 100)
        return batches[n % 10]

    return Loop(step, model, optimizer, batch, lambda: {"scales": scales})
