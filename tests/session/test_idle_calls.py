"""Calls that run no ops, as while a memory to learn from is not full: what follows them is planned all the same."""

import random
from collections import deque

import pytest
import torch
from torch import nn

import hocket
from hocket.autotune import admission
from support.twins import Program, ran


class Learner:
    """Deep Q-learning's: a memory that fills outside of the step, which learns from a sample once there are enough."""

    def __init__(self, least: int) -> None:
        torch.manual_seed(0)
        self.replayed: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=200)
        self.model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.least = least

    def remember(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.replayed.append((torch.randn(1, 4, generator=generator), torch.randn(1, generator=generator)))

    def step(self) -> torch.Tensor | None:
        if len(self.replayed) < self.least:
            return None
        states, rewards = zip(*random.sample(self.replayed, 8), strict=True)
        loss = nn.functional.smooth_l1_loss(self.model(torch.cat(states)).max(1).values, torch.cat(rewards))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 100)
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("least", [8, 30, 150])
def test_a_step_that_waits_for_its_memory_is_planned_once_it_learns(least: int) -> None:
    def make() -> Program:
        own = Learner(least)
        return Program(own.step, own.model, own.optimizer, own.remember, lambda: own.optimizer.state_dict()["state"])

    fast = ran(make, lambda number: (), 3 * least + 90)
    assert fast.verdict == "planned", fast.why


def test_a_step_that_never_runs_ops_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_IDLE", 5)
    model = nn.Linear(2, 2)
    fast = hocket.schedule(lambda: None, model, torch.optim.SGD(model.parameters(), lr=0.1), cache=False)
    for _ in range(200):
        fast()
    assert "runs no ops" in fast.why
