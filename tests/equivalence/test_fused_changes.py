"""A fused step whose models, modes or options change after the capture."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hocket
from equivalence.fused_jobs import LONG, OPTIMIZERS, RATES, Plain, check, job
from execution.probe import KINDS
from hocket.job import Job
from quick import covering, some

pytestmark = pytest.mark.usefixtures("one_thread")


def rates(value: Any) -> Callable[[Job], None]:
    def change(made: Job) -> None:
        made.optimizer.param_groups[0]["lr"] = value

    return change


def widened(made: Job) -> None:
    hocket.lr_scheduler.StepLR(made.optimizer, step_size=[1, 2, 3], gamma=0.5)


# A change to a captured step, and the optimizer that it is made with.
CHANGES = {
    "a rate becomes rates": (lambda p: hocket.optim.Adam(p, lr=0.01), rates(RATES)),
    "a rate becomes a tensor of rates": (lambda p: hocket.optim.SGD(p, lr=0.01), rates(torch.tensor(RATES))),
    "rates become one": (OPTIMIZERS["adam"], rates(0.05)),
    "rates become others": (OPTIMIZERS["adamw"], rates([0.1, 0.2, 0.3])),
    "a pair becomes pairs": (
        lambda p: hocket.optim.Adam(p, lr=0.01),
        lambda made: made.optimizer.param_groups[0].update(betas=([0.9, 0.5, 0.1], 0.99)),
    ),
    "a list of pairs": (
        lambda p: hocket.optim.Adam(p, lr=RATES),
        lambda made: made.optimizer.param_groups[0].update(betas=[(0.9, 0.99), (0.5, 0.9), (0.1, 0.95)]),
    ),
    "a scheduler of rates comes": (lambda p: hocket.optim.RMSprop(p, lr=0.01), widened),
    "a rate of one model": (
        lambda p: hocket.optim.Adagrad(p, lr=0.01),
        lambda made: made.optimizer.set_for_model(made.optimizer.param_groups[0], "lr", 1, 0.5),
    ),
    "a model is frozen": (OPTIMIZERS["sgd"], lambda made: made.optimizer.freeze(1)),
}


@pytest.mark.parametrize(("what", "kind"), covering(CHANGES, KINDS))
def test_changes_after_the_capture_are_noticed(what, kind):
    optimizer, change = CHANGES[what]
    check(functools.partial(job, optimizer, Plain), kind, changes={LONG // 2: change})


SEPARATE = {"all fused": (), "partly fused": ("3",)}  # blocks that do not fuse


@pytest.mark.parametrize("kind", some(KINDS[::-1]))
def test_there_and_back_again(kind):
    make = functools.partial(job, lambda p: hocket.optim.Adam(p, lr=0.01), Plain)
    changes = {15: rates(RATES), 30: rates(0.02), 45: rates([0.01, 0.02, 0.03])}
    check(make, kind, changes=changes, steps=60)


@pytest.mark.parametrize(("separate", "optimizer", "kind"), covering(SEPARATE, covering(["sgd", "adam"], KINDS)))
def test_models_that_leave_and_come(separate, optimizer, kind):
    def drop(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).drop(1)

    def refill(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).refill(0, Plain(), lr=0.005)

    make = functools.partial(job, OPTIMIZERS[optimizer], Plain, separate=SEPARATE[separate])
    check(make, kind, changes={15: drop, 30: refill}, steps=45)


@pytest.mark.parametrize(("optimizer", "kind"), covering(["adam", "adamw", "adagrad"], KINDS))
def test_models_that_rest_and_count_their_steps_apart(optimizer, kind):
    changes = {15: lambda made: made.optimizer.freeze(1), 30: lambda made: made.optimizer.unfreeze(1)}
    check(functools.partial(job, OPTIMIZERS[optimizer], Plain), kind, changes=changes, steps=45)


@pytest.mark.parametrize("kind", some(KINDS[::-1]))
def test_a_slot_refilled_by_values_leaves_the_captured_step_as_it_is(kind):
    """Once models have counts and rates of their own, another model in a slot is other values in the same tensors."""

    def refill(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).refill(2, Plain(), lr=0.02)

    make = functools.partial(job, OPTIMIZERS["adam"], Plain)
    captures = []

    def count(made: Job) -> None:
        captures.append((made.model._hocket_version, made.optimizer._hocket_version))
        refill(made)
        captures.append((made.model._hocket_version, made.optimizer._hocket_version))

    check(make, kind, changes={12: refill, 30: count}, steps=45)
    assert captures[0] == captures[1] == captures[2] == captures[3]
