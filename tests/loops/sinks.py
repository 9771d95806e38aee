"""Loops that call sinks: text, rows, a progress bar, every step or every tenth; one that raises."""

from __future__ import annotations

import csv
import io
from collections import deque
from datetime import timedelta

import torch.nn.functional as F

import hocket
from loops.loop import Loop, classifier, loop, task, train, update


class Run:
    """Takes metrics as wandb's `log` does, and scalars as a SummaryWriter does."""

    def __init__(self) -> None:
        self.rows = []
        self.recent = deque(maxlen=3)

    def log(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))
        self.recent.append(metrics["loss"])
        return len(self.rows)

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


@loop(planned=True)
def printed_by_a_sink(model, optimizer, batches) -> Loop:
    count = {"steps": 0}

    @hocket.sink
    def show(number, loss, *, rate):
        print(f"step {number}: {loss:.6f} ({rate:.1e})")

    def step(batch):
        loss = train(model, optimizer, batch)
        count["steps"] += 1
        show(count["steps"], loss.item(), rate=optimizer.param_groups[0]["lr"])
        return loss

    def after(n, _):
        optimizer.param_groups[0]["lr"] *= 0.99

    return Loop(step, model, optimizer, batches, lambda: count, after)


@loop(planned=True)
def several_sinks_in_order(model, optimizer, batches) -> Loop:
    """Some of them every tenth step, with sums and lists."""
    run, file, state, losses = Run(), io.StringIO(), {"step": 0, "total": 0.0}, []
    log, scalar, row = hocket.sink(run.log), hocket.sink(run.add_scalar), hocket.sink(csv.writer(file).writerow)

    def step(batch):
        loss = train(model, optimizer, batch)
        state["step"] += 1
        state["total"] += loss.item() * len(batch[0])
        losses.append(loss.item())
        if state["step"] % 10 == 0:
            log({"loss": loss.item(), "mean": state["total"] / state["step"]}, step=state["step"])
        scalar("train/loss", loss.item(), state["step"])
        row([state["step"], "loss", round(loss.item(), 4)])
        return loss

    return Loop(
        step,
        model,
        optimizer,
        batches,
        lambda: {"rows": run.rows, "recent": run.recent, "file": file.getvalue(), "losses": losses, "state": state},
    )


class Learner:
    """Its sink is a method."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.batches = task()
        self.steps, self.shown = 0, []

    @hocket.sink
    def show(self, loss):
        self.shown.append(loss)

    def step(self, batch):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        update(self.optimizer, loss)
        self.steps += 1
        if self.steps % 3 == 0:
            self.show(loss.item() / self.steps)
        return loss


@loop(planned=True)
def a_method_that_is_a_sink() -> Loop:
    own = Learner()
    return Loop(own.step, own.model, own.optimizer, own.batches, lambda: {"steps": own.steps, "shown": own.shown})


@loop(planned=True)
def a_sink_that_raises(model, optimizer, batches) -> Loop:
    count, seen = {"steps": 0, "loss": 0.0}, []

    def note(number, loss):
        seen.append((number, loss))
        if number % 17 == 0:
            raise ValueError(f"no room for {number}")

    keep, also = hocket.sink(note), hocket.sink(lambda number: seen.append(number))

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        count["steps"] += 1
        count["loss"] += loss.item()
        keep(count["steps"], loss.item())
        also(count["steps"])
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"count": count, "seen": seen})


@loop(planned=True)
def a_sink_before_what_may_raise(model, optimizer, batches) -> Loop:
    seen = []
    keep = hocket.sink(lambda loss: seen.append(loss))

    def step(batch):
        first = F.cross_entropy(model(batch[0]), batch[1])
        keep(first.item())
        update(optimizer, first + F.cross_entropy(model(-batch[0]), batch[1]))
        return first

    return Loop(step, model, optimizer, batches, lambda: {"seen": seen})


@loop(word="that sets closure of step: count")
def a_sink_that_counts_what_the_step_reads(model, optimizer, batches) -> Loop:
    """It gets plain numbers where it looks for itself, as C code needs them."""
    count, seen = {"shown": 0}, []

    @hocket.sink
    def show(loss):
        count["shown"] += 1
        seen.append(str(timedelta(seconds=count["shown"])))

    def step(batch):
        loss = classifier(model, batch)
        show(loss.item())
        return update(optimizer, loss / count["shown"])

    return Loop(step, model, optimizer, batches, lambda: {"count": count, "seen": seen})


@loop(planned=True)
def a_sink_of_tensors(model, optimizer, batches) -> Loop:
    seen = []
    keep = hocket.sink(lambda weight: seen.append(weight.sum().item()))

    def step(batch):
        loss = train(model, optimizer, batch)
        keep(model[0].weight.detach())
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"seen": seen})
