"""Schedules whose clock a test sets: what a planned step takes, and what an eager one."""

import torch

import hocket
from execution.probe import look, meanwhile_in_eager
from hocket import zoo
from hocket.adaptation import DriftLimits
from hocket.session import Schedule

# Calls after which the first look at a verdict is over.
AFTER_A_LOOK = 40
ONE = hocket.Machine.of(cores=1)
LIMITS = DriftLimits(factor=1.3, window=5, patience=2, rest_steps=30, max_share=1.0)


def looking(step):
    """The same step, with a look at its inputs first."""

    def looked(batch):
        inputs, targets = batch
        return step((look(inputs, 0), targets))

    return looked


class Clock:
    """A clock that moves by itself when it is asked, and in eager steps by something more."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planned_ms = 2.0
        self.eager_ms = 3.0
        self.num_eager = 0

    def __call__(self) -> float:
        self.now_s += self.planned_ms / 1e3
        return self.now_s

    def more(self, number: int) -> None:
        self.num_eager += 1
        self.now_s += (self.eager_ms - self.planned_ms) / 1e3

    def eager(self, step):
        meanwhile_in_eager.append(self.more)
        return looking(step)


def scheduled(clock: Clock, **options) -> tuple[hocket.Job, Schedule]:
    torch.manual_seed(0)
    job = zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam")
    options = {"planner": "serial", "machine": ONE, "drift": LIMITS, **options}
    return job, Schedule(clock.eager(job.step), job.model, job.optimizer, clock=clock, **options)


def steps_until(fast: Schedule, job: hocket.Job, decided: bool, limit: int = 1000) -> int:
    for number in range(limit):
        if fast.decided == decided:
            return number
        fast(job.batch(number))
    raise AssertionError(f"decided is still {fast.decided} after {limit} steps")
