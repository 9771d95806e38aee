"""A step that was refused for what only begins so is looked at once more, and planned."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.autotune import parted
from support.steps import update
from support.twins import Program, ran

STEPS, SOON = 200, 60


def fills_a_window(state: Any, loss: torch.Tensor) -> None:
    state.window = [*state.window, loss.item()][-20:]


def hands_on_an_array(state: Any, loss: torch.Tensor) -> None:
    state.window = [float(np.array([loss.detach()]).sum())]


@pytest.mark.parametrize("between", [fills_a_window, hands_on_an_array])
def test_a_refused_step_is_looked_at_again(between, monkeypatch, caplog):
    monkeypatch.setattr(parted, "LOOK_AGAIN", (SOON, 10))

    def make() -> Program:
        models = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
        state = SimpleNamespace(window=[])

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = update(optimizers[1], F.cross_entropy(models[1](batch), torch.zeros(len(batch), dtype=torch.long)))
            between(state, loss)
            update(optimizers[0], models[0](batch).square().mean())
            return loss.detach()

        return Program(step, models, optimizers, state=lambda: state.window)

    fast = ran(make, lambda number: torch.randn(6, 4), STEPS, planner="serial")  # without regions
    assert fast.verdict == ("planned" if between is fills_a_window else "eager"), fast.why
    assert sum("stays eager" in record.message for record in caplog.records) == 1  # said once


STEP = """
def step(batch):
    loss = model(batch).square().mean()
    if len(batch) == 5:
        loss = loss * float(loss.detach().numpy())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""


def test_plans_of_other_batches_stay(monkeypatch):
    monkeypatch.setattr(parted, "LOOK_AGAIN", (SOON, 10))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made: dict[str, Any] = {"model": model, "optimizer": optimizer}
    exec(STEP, made)  # whose source is not at hand, so that it is not divided
    fast = hocket.schedule(made["step"], model, optimizer, guard=False, planner="serial", cache=False)
    verdicts = []
    for number in range(STEPS):
        fast(torch.ones(5 if number % 10 == 9 else 6, 4))
        verdicts.append(fast.verdict)
    assert verdicts[SOON - 20 :] == (STEPS - SOON + 20) // 10 * [*9 * ["planned"], "eager"]


RARE = """
def step(batch):
    if state.count % 10 == 0:
        state.seen = float(model(batch).sum().detach().numpy())
    loss = model(batch).square().mean() * (1.0 if state.count < 45 else 0.5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.count += 1
    return loss.detach()
"""


def test_a_rare_evaluation_that_is_refused_does_not_stand_for_what_comes_later():
    def make() -> Program:
        model = nn.Linear(4, 2)
        made = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        state = SimpleNamespace(count=1, seen=0.0)
        exec(RARE, {**made, "state": state}, made)
        return Program(made["step"], model, made["optimizer"], state=lambda: (state.count, state.seen))

    fast = ran(make, lambda number: torch.randn(6, 4), 95, planner="serial")
    assert fast.verdict == "planned", fast.why
