"""Jobs that publish versions, and agents that run forwards on them."""

import time
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it (4 s)
from torch import nn

from hocket import distribute
from support.steps import update

TIMEOUT_S = 30.0


class Counting(nn.Module):
    """Every parameter is minus the number of the version: its gradient is one, and so is the rate."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(width, width).double()) for _ in range(4))
        self.register_buffer("shift", torch.zeros(()).double())
        self.register_buffer("seen", torch.zeros(1).double())

    def forward(self, x):
        if self.training:
            self.seen.add_(1.0)
            return x.sum() * 0.0 + sum(layer.sum() for layer in self.layers)
        found = []
        for layer in self.layers:
            x = torch.tanh(x @ (layer - layer)) + x
            found += [layer.min(), layer.max()]
        return torch.stack([*found, -self.seen[0], self.shift])


def ones() -> torch.Tensor:
    """Arguments of an agent's call."""
    return torch.ones(2, 200).double()


class Moving:
    """A step that moves all parameters of `Counting` by one."""

    def __init__(self) -> None:
        self.model = Counting()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.batch = ones()

    def step(self, batch):
        return update(self.optimizer, self.model(batch))


def rank_that_publishes(rank, say, workers, servers, stages, timeout_s=TIMEOUT_S) -> Any:
    """A rank of a job that publishes after each of some steps; a stage begins when its key is in the store.

    A stage without a number of steps, of one worker, goes on until the next one's key is there. Returns the versions.
    """
    of = Moving()
    settings: dict[str, Any] = {"num_servers": servers, "timeout_s": timeout_s, "executor": "python"}
    if rank >= workers:
        return distribute.server(of.step, of.model, of.optimizer, of.batch, **settings)
    versions = []
    with distribute.worker(of.step, of.model, of.optimizer, **settings) as fast:
        if rank == 0:
            of.model.shift.fill_(7.0)  # the step does not use it; agents have it of rank 0
        store = fast._membership.store
        for number, (key, steps) in enumerate(stages):
            while not store.check([key]):
                time.sleep(0.02)
            left = steps
            while left if left is not None else not store.check([stages[number + 1][0]]):
                fast(of.batch)
                versions.append(fast.publish())
                left = left - 1 if left is not None else None
            say(key)
    return versions


def rank_that_stays(rank, say) -> None:
    """A rank of a job that runs one step, publishes nothing, and stays until the test says so."""
    of = Moving()
    settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "executor": "python"}
    if rank == 1:
        distribute.server(of.step, of.model, of.optimizer, of.batch, **settings)
        return
    with distribute.worker(of.step, of.model, of.optimizer, **settings) as fast:
        fast(of.batch)
        say("there")
        while not fast._membership.store.check(["end"]):
            time.sleep(0.02)


def versions_seen(rank, say, address, until, options) -> Any:
    """An agent that calls until it has seen version `until`, and checks that each call had one version."""
    model = Counting().eval()
    seen, orders = [], []
    with distribute.agent(model, address, timeout_s=TIMEOUT_S, **options) as fresh:
        while not seen or seen[-1] < until:
            *found, shift = fresh(ones()).tolist()
            assert found == [-float(fresh.version)] * 9, (found, fresh.version)
            assert shift == 7.0
            seen.append(fresh.version)
            if len(seen) == 1:
                say("first")
        orders = fresh.arrivals()
        plan = str(fresh.plan)
    return seen, orders, plan
