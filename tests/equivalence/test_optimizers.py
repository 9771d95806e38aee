"""Every optimizer, under schedules that change its numbers between steps: five planned steps are five eager steps.

A learning rate or a step count that was baked into the graph shows in the second or third step.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from equivalence.compare import Decay, check_twins
from hocket.job import Job
from quick import covering
from support.steps import update

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=1e-2, maximize=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, fused=True),
    "sgd-whole-rate": lambda p: torch.optim.SGD(p, lr=1, momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2, betas=(0.5, 0.9), eps=1e-6),
    "adam-equal-numbers": lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.5, betas=(0.5, 0.5), eps=0.5),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adam-maximize": lambda p: torch.optim.Adam(p, lr=1e-2, maximize=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=1e-2),
    "nadam-decoupled": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=1e-2, decoupled_weight_decay=True),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=1e-2),
    "radam-foreach": lambda p: torch.optim.RAdam(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=1e-2, weight_decay=1e-2),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=1e-1, foreach=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=1e-2),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=1e-2),
    "adadelta-foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2, weight_decay=1e-2),
    "asgd-foreach": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=1e-2),
    "adamax-foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}

SCHEDULERS = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "cosine-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "linear-then-cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-3, max_lr=0.1, step_size_up=2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
}


def job(make_optimizer, grouped: bool = False) -> Job:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    # A parameter that gets no gradient: optimizers pass it over, and keep no state for it.
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.2}]
    optimizer = make_optimizer(groups if grouped else parameters)
    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(3)]

    def step(batch):
        inputs, targets = batch
        return update(optimizer, nn.functional.cross_entropy(model(inputs), targets))

    return Job(step, model, optimizer, batches)


# RAdam rectifies its step from the sixth on, ASGD averages from step t0 on: branches on a step count, at each of which
# the step is captured once more.
CAPTURES = {"radam": 2, "radam-foreach": 2, "asgd": 3, "asgd-foreach": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_every_optimizer_are_those_of_eager(name):
    check_twins(functools.partial(job, OPTIMIZERS[name]), captures=CAPTURES.get(name, 1))


@pytest.mark.parametrize("name", ["sgd-nesterov", "adam", "adamw-foreach", "adam-fused", "rmsprop", "adagrad"])
def test_groups_of_parameters_keep_their_own_rates(name):
    check_twins(functools.partial(job, OPTIMIZERS[name], grouped=True))


@pytest.mark.parametrize(("name", "scheduler"), covering(["sgd-nesterov", "adamw", "adam-fused"], SCHEDULERS))
def test_every_schedule_reaches_the_planned_step(name, scheduler):
    check_twins(functools.partial(job, OPTIMIZERS[name], grouped=True), scheduler=SCHEDULERS[scheduler])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_rate_given_as_a_tensor_is_read_anew_in_every_step(kind, fused):
    check_twins(functools.partial(job, lambda p: kind(p, lr=torch.tensor(0.01), fused=fused)), scheduler=Decay)


def by_hand() -> Job:
    model = nn.Linear(4, 3)
    # The optimizer only keeps the rate, where a scheduler finds it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    velocity = {p: torch.zeros_like(p) for p in model.parameters()}

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            rate = optimizer.param_groups[0]["lr"]
            for p in model.parameters():
                velocity[p].mul_(0.9).add_(p.grad)
                p -= rate * velocity[p]
                p.grad = None
        return loss

    return Job(step, model, optimizer, [torch.randn(5, 4) for _ in range(2)])


def test_an_update_written_by_hand_is_one_like_any_other():
    captured = check_twins(by_hand)
    assert "update" in {op.role for op in captured.graph.ops}


def by_hand_out() -> Job:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scratch = {p: torch.zeros_like(p) for p in model.parameters()}

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                change = torch.mul(p.grad, optimizer.param_groups[0]["lr"], out=scratch[p])
                torch.sub(p, change, out=p)
        return loss

    return Job(step, model, optimizer, [torch.randn(5, 4) for _ in range(2)])


def test_an_update_may_write_its_result_with_out():
    check_twins(by_hand_out)


class Signed(torch.optim.Optimizer):
    """An optimizer that torch does not know; it keeps a count in Python and a tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["count"] += 1
                state["mean"].lerp_(p.grad, 1 / state["count"] ** 0.5)
                rate = -group["lr"] / (1 + 0.1 * state["count"]) * math.sqrt(1 - 0.9 ** state["count"])
                p.add_(state["mean"].sign(), alpha=rate)


def test_a_strangers_optimizer_with_a_count_in_python_is_followed():
    check_twins(functools.partial(job, Signed))


def test_a_scheduler_that_watches_the_loss_reaches_the_planned_step():
    def plateau(optimizer):
        inner = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        inner_step = inner.step
        inner.step = lambda: inner_step(1.0)
        return inner

    check_twins(functools.partial(job, OPTIMIZERS["adam"]), scheduler=plateau)
