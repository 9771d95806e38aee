"""Fused steps by plan: `hocket.schedule` computes what the eager fused step computes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hocket
from equivalence.compare import twins
from equivalence.fused_jobs import LONG, OPTIMIZERS, RATES, Plain, check, job, planned
from execution.probe import KINDS
from quick import covering, some

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: hocket.lr_scheduler.StepLR(o, step_size=[3, 5, 7], gamma=[0.5, 0.9, 0.1]),
    "cosine": lambda o: hocket.lr_scheduler.CosineAnnealingLR(o, T_max=[5, 10, 20]),
}
# `step` gets the losses of the last training step.
PLATEAUS: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda o: hocket.lr_scheduler.ReduceLROnPlateau(o, patience=[0, 1, 2], factor=[0.5, 0.1, 0.9]),
    "plateau of one number": lambda o: hocket.lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=2),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("optimizer", "kind"), covering(OPTIMIZERS, KINDS))
def test_a_schedule_computes_the_bits_of_the_fused_step(optimizer, kind):
    check(functools.partial(job, OPTIMIZERS[optimizer]), kind, scheduler=SCHEDULERS["cosine"])


ALONE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: hocket.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda p: hocket.optim.SGD(p, lr=0.1),
    "adam": lambda p: hocket.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adamw": lambda p: hocket.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: hocket.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize(("optimizer", "kind"), covering(ALONE, KINDS))
def test_one_model_alone_whose_rate_falls(optimizer, kind):
    alone = functools.partial(job, ALONE[optimizer], num_models=1)
    check(alone, kind, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9))


@pytest.mark.parametrize(("scheduler", "optimizer", "kind"), covering(PLATEAUS, covering(["sgd", "adam"], KINDS)))
def test_a_schedule_follows_rates_that_fall_when_a_loss_stands_still(optimizer, scheduler, kind):
    made = []
    fell = PLATEAUS[scheduler]
    check(functools.partial(job, OPTIMIZERS[optimizer]), kind, scheduler=lambda o: made.append(fell(o)) or made[-1])
    rates = [each.get_last_lr()[0].tolist() for each in made]
    assert rates[0] == rates[1]
    assert sum(rate < first for rate, first in zip(rates[0], RATES, strict=True)) >= 1, "some rate has to fall"


@pytest.mark.parametrize(("backend", "kind"), covering(["vmap", "loop"], KINDS))
def test_whatever_computes_the_ops(backend, kind):
    # vmap draws dropout its own way: no random numbers here.
    plain = functools.partial(job, OPTIMIZERS["adam"], Plain, backend=backend)
    check(plain, kind, scheduler=SCHEDULERS["step"])


@pytest.mark.parametrize("kind", some(KINDS[::-1]))
def test_a_backend_chosen_by_timing_agrees_within_rounding(kind):
    # Twins may choose differently in their eager steps, and backends agree within rounding only.
    pair = twins(functools.partial(job, OPTIMIZERS["adam"], Plain, backend="auto"), SCHEDULERS["step"])
    fast = planned(pair.planned, kind)
    for number in range(LONG):
        first, second = pair.eager.step(pair.eager.batch(number)), fast(pair.planned.batch(number))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert fast.verdict == "planned"
