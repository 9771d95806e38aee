"""A fused step is captured like any other: planned steps are eager ones, bit for bit, and follow every number."""

import functools
from importlib import import_module

import pytest
import torch

from equivalence.compare import check_twins
from hocket import lr_scheduler
from hocket.job import Job
from optim.twins import CASES, EACH, trained
from quick import covering


def job(case: str) -> Job:
    params, optimizer = trained(case, steps=0)
    model = torch.nn.Module()
    for place, p in enumerate(params):
        model.register_parameter(f"p{place}", p)
    batches = [[torch.randn(p.shape, dtype=torch.float64) for p in params] for _ in range(3)]

    def step(batch):
        optimizer.zero_grad()
        losses = sum((0.15 * p * p + p * x).reshape(3, -1).sum(1) for p, x in zip(params, batch, strict=True))
        losses.sum().backward()
        optimizer.step()
        return losses

    return Job(step, model, optimizer, batches)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (n % 2)) for n, case in enumerate(CASES)]
)
def test_every_option(case):
    # With one beta for all, RAdam asks in Python whether the variance is rectified: from the sixth step on it is.
    check_twins(functools.partial(job, case), captures=2 if case in ("radam", "radam-decoupled") else 1)


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=[1, 2, 3], gamma=0.5),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(
        o,
        max_lr=[0.1, 0.2, 0.3],
        total_steps=[8, 6, 9],
        cycle_momentum="betas" in o.bounds or bool(torch.as_tensor(o.param_groups[0].get("momentum", 0)).any()),
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=[3, 4, 5]),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[[2, 4], [3], [1, 5]], gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda t, m=m: 1 / (1 + m * t) for m in range(3)]),
    "exponentials": lambda o: lr_scheduler.ExponentialLR(o, gamma=[0.9, 0.99, 0.8]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),  # a rate for all stays a float, and is followed
}


@pytest.mark.parametrize(
    ("case", "scheduler"), covering([*EACH, "sgd-momentum", "adam", "rmsprop-momentum"], SCHEDULERS)
)
def test_schedules_with_an_argument_for_each_model(case, scheduler):
    check_twins(functools.partial(job, case), scheduler=SCHEDULERS[scheduler])


@pytest.mark.parametrize("case", ["sgd-nesterovs", "adam-all", "adam"])
def test_parameters_that_go_a_few_models_at_a_time(case, monkeypatch):
    monkeypatch.setattr(import_module("hocket.optim.chunks"), "CHUNK_BYTES", 200)
    check_twins(functools.partial(job, case))
