"""Loops whose step counts in an object or a class: attributes, slots, and a class used as a namespace."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from loops.loop import Loop, loop, task, update


class Trainer:
    """The usual class around a loop."""

    started = 0

    def __init__(self, rate: float = 0.05) -> None:
        self.model, self.optimizer, self.batches = task()
        self.step = 0
        self.rate = rate

    def accumulate(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.step += 1
        if self.step % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def warm_up(self, batch):
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, self.step / 150)
        return update(self.optimizer, F.cross_entropy(self.model(batch[0]), batch[1]))

    def decay(self, batch):
        Trainer.started += 1
        return update(self.optimizer, F.cross_entropy(self.model(batch[0]), batch[1]) / (1 + Trainer.started / 100))

    def loop(self, method: Any) -> Loop:
        return Loop(method, self.model, self.optimizer, self.batches, lambda: {"step": self.step, "n": Trainer.started})


@loop(planned=True)
def accumulation_by_attribute() -> Loop:
    trainer = Trainer()
    return trainer.loop(trainer.accumulate)


@loop(planned=True)
def warm_up_inside() -> Loop:
    trainer = Trainer()
    return trainer.loop(trainer.warm_up)


@loop(planned=True)
def counter_of_a_class() -> Loop:
    Trainer.started = 0
    trainer = Trainer()
    return trainer.loop(trainer.decay)


class Progress:
    """A number without a dictionary around it."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = 0


@loop(planned=True)
def counter_in_slots() -> Loop:
    model, optimizer, batches = task()
    progress = Progress()

    def step(batch):
        progress.done += 1
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) * (0.99**progress.done))

    return Loop(step, model, optimizer, batches, lambda: {"done": progress.done})


class Settings:
    """A class used as a namespace."""

    step = 0
    weight = 1.0


@loop(planned=True)
def counter_in_a_class_without_objects() -> Loop:
    model, optimizer, batches = task()
    Settings.step = 0

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, 2 * loss if Settings.step % 8 == 0 else loss)
        Settings.step += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"step": Settings.step})


@loop(planned=True)
def number_of_a_class_changed_outside() -> Loop:
    model, optimizer, batches = task()
    Settings.weight = 1.0

    def step(batch):
        return update(optimizer, Settings.weight * F.cross_entropy(model(batch[0]), batch[1]))

    def after(n, _):
        if n in (30, 90):
            Settings.weight += 0.5

    return Loop(step, model, optimizer, batches, lambda: {"weight": Settings.weight}, after)
