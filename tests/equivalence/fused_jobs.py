"""Fused jobs of a small net, and twins of them of which one is scheduled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hocket
from equivalence.compare import assert_same, everything, named_leaves, twins
from hocket.job import Job
from hocket.session import Schedule
from support.steps import update

RATES = [0.01, 0.03, 0.002]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: hocket.optim.SGD(p, lr=RATES, momentum=[0.9, 0.0, 0.5], nesterov=False),
    "adam": lambda p: hocket.optim.Adam(p, lr=RATES, betas=([0.9, 0.8, 0.5], 0.99)),
    "adamw": lambda p: hocket.optim.AdamW(p, lr=RATES, weight_decay=[0.0, 0.1, 0.01], amsgrad=True),
    "rmsprop": lambda p: hocket.optim.RMSprop(p, lr=RATES, alpha=[0.9, 0.99, 0.5], centered=True),
    "adagrad": lambda p: hocket.optim.Adagrad(p, lr=RATES, lr_decay=[0.0, 0.1, 0.01]),
    "adadelta": lambda p: hocket.optim.Adadelta(p, lr=[1.0, 0.5, 0.1], rho=[0.9, 0.5, 0.99]),
}
LONG = 30  # steps until a schedule that compares nothing has long decided


class Net(nn.Module):
    """Convolution, running statistics, a residual add and dropout, as small as they get."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.drop(x + self.second(x)).flatten(1))


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def job(
    make_optimizer: Callable[[Any], Any], make: Callable[[], nn.Module] = Net, num_models: int = 3, **options: Any
) -> Job:
    array = hocket.fuse([make() for _ in range(num_models)], shared=True, **({"backend": "rule"} | options))
    optimizer = make_optimizer(array.parameters())
    batches = [(torch.randn(4, 1, 4, 4), torch.randint(0, 3, (4,))) for _ in range(3)]

    def step(batch):
        return update(optimizer, array.loss(nn.functional.cross_entropy, array(batch[0]), batch[1])).detach()

    return Job(step, array, optimizer, batches)


def planned(made: Job, kind: str) -> Schedule:
    one = hocket.Machine.of(cores=1)
    options = {"planner": "serial", "guard": False, "strict": True, "machine": one, "executor": kind}
    return hocket.schedule(made.step, made.model, made.optimizer, **options)


def check(
    make: Callable[[], Job],
    kind: str,
    *,
    scheduler: Callable[[Any], Any] = lambda optimizer: None,
    changes: dict[int, Callable[[Job], Any]] | None = None,
    steps: int = LONG,
) -> Schedule:
    """Twins, one eager and one scheduled, with the same bits after every step; `changes` befall both before a step."""
    pair = twins(make, scheduler)
    fast = planned(pair.planned, kind)
    for number in range(steps):
        if changes and number in changes:
            if number > min(changes):
                assert fast.decided, "a change in the middle of a search would prove little"
            for each in pair.both():
                torch.manual_seed(number)
                changes[number](each)
        results = []
        for run, each in ((pair.eager.step, pair.eager), (fast, pair.planned)):
            torch.manual_seed(100 + number)
            results.append(run(each.batch(number)))
        where = f"after step {number}"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where)
        assert_same(everything(pair.eager), everything(pair.planned), where)
        for one, losses in zip(pair.schedulers, results, strict=True):
            if isinstance(one, hocket.lr_scheduler.ReduceLROnPlateau):
                one.step(losses)
            elif one is not None:
                one.step()
    assert fast.verdict == "planned", fast.why
    fast.close()
    return fast
