"""Steps with learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.optim import lr_scheduler

from loops.bookkeeping.job import STEPS, Job, step


def scheduled(make: Callable[[Any], Any]) -> Callable[[Job], Any]:
    def build(job: Job) -> Any:
        scheduler = make(job.optimizer)
        job.state["scheduler"] = scheduler.state_dict

        def train(batch):
            x, y = batch
            loss = F.cross_entropy(job.model(x), y)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            scheduler.step()
            return loss

        return train

    return build


for _name, _make in {
    "step_lr": lambda o: lr_scheduler.StepLR(o, 10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "warm_up_by_lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 20)),
    "warm_up_then_cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(o, 50)], [8]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7),
}.items():
    STEPS[_name] = scheduled(_make)


@step
def plateau(job):
    scheduler = lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=2, factor=0.7)
    job.state["scheduler"] = scheduler.state_dict

    def train(batch):
        loss = job.train(*batch)
        scheduler.step(loss.item())
        return loss.item()

    return train


@step
def scheduler_every_tenth(job):
    scheduler = lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    job.state["count"] = count = {"n": 0}

    def train(batch):
        loss = job.train(*batch)
        count["n"] += 1
        if count["n"] % 10 == 0:
            scheduler.step()
            print(f"step {count['n']}: lr {scheduler.get_last_lr()[0]:.5f} loss {loss.item():.4f}")
        return loss

    return train


@step
def two_schedulers(job):
    warm, decay = lr_scheduler.ConstantLR(job.optimizer, 0.5, 5), lr_scheduler.ExponentialLR(job.optimizer, 0.99)
    job.state["rates"] = rates = []

    def train(batch):
        loss = job.train(*batch)
        warm.step()
        decay.step()
        rates.append(decay.get_last_lr()[0])
        return loss

    return train


@step
def rate_by_hand(job):
    job.state["count"] = count = {"n": 0}

    def train(batch):
        count["n"] += 1
        for group in job.optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, count["n"] / 15)
        return job.train(*batch)

    return train
