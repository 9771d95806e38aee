"""Steps of which the middle alone is planned: what it hands on, what raises around it, and what is said of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import CaptureError

Made = tuple[Callable[[Any], Any], nn.Module, torch.optim.Optimizer, Callable[[], Any]]
CALLS = 40


def task() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def group_kept_in_a_variable() -> Made:
    model, optimizer = task()

    def step(x: torch.Tensor) -> None:
        (group,) = list(optimizer.param_groups)
        loss = fit(model, optimizer, x)
        group["lr"] *= 0.99
        print(loss.item())

    return step, model, optimizer, lambda: optimizer.param_groups[0]["lr"]


def dict_kept_elsewhere() -> Made:
    model, optimizer = task()
    table: dict[str, Any] = {}

    def step(x: torch.Tensor) -> None:
        info = {"size": len(x)}
        table["info"] = info
        loss = fit(model, optimizer, x)
        info["loss"] = loss.item()
        print(info)

    return step, model, optimizer, lambda: table


def fresh_dict() -> Made:
    model, optimizer = task()
    table: dict[str, Any] = {}

    def step(x: torch.Tensor) -> dict[str, Any]:
        info: dict[str, Any] = {"size": len(x)}
        loss = fit(model, optimizer, x)
        info["loss"] = loss.item()
        table["last"] = dict(info)
        print(info)
        return info

    return step, model, optimizer, lambda: table


def graph_used_after() -> Made:
    model, optimizer = task()

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        print("forward")
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer, lambda: None


def raises_after() -> Made:
    model, optimizer = task()
    count = [0]

    def step(x: torch.Tensor) -> float:
        loss = fit(model, optimizer, x)
        count[0] += 1
        print(count[0])
        if count[0] % 9 == 0:
            raise KeyError(count[0])
        return loss.item()

    return step, model, optimizer, lambda: count


def raises_before() -> Made:
    model, optimizer = task()
    weights = [1.0]

    def step(x: torch.Tensor) -> float:
        weight = random.choice(weights)
        if weight != weight:
            raise ValueError("no weight")
        loss = fit(model, optimizer, x * weight)
        weights.append(float("nan") if len(weights) % 7 == 6 else loss.item())
        return loss.item()

    return step, model, optimizer, lambda: weights


def another_branch_later() -> Made:
    model, optimizer = task()
    count = [0]

    def step(x: torch.Tensor) -> None:
        if random.random() < 0.3:
            x = x.flip(0)
        if count[0] > 20:
            x = x * random.uniform(0.5, 1.5)
        loss = fit(model, optimizer, x)
        count[0] += 1
        print(loss.item())

    return step, model, optimizer, lambda: count


def changes_what_the_middle_reads() -> Made:
    model, optimizer = task()
    settings: dict[str, Any] = {"scale": 1.0, "name": "a"}

    def step(x: torch.Tensor) -> None:
        if settings["name"] == "b":
            x = -x
        loss = fit(model, optimizer, x * settings["scale"])
        settings["scale"] = 0.9 * settings["scale"] + 0.1 * (loss.item() > 0.3)
        settings["name"] = "b" if loss.item() > 0.5 else "a"
        print(settings)

    return step, model, optimizer, lambda: settings


def unhooked_twice() -> Made:
    model, optimizer = task()
    history: list[Any] = []

    def step(x: torch.Tensor) -> None:
        both = []
        both.append(fit(model, optimizer, x).detach())
        same = both
        fit(model, optimizer, -x)
        same.append(len(both))
        history.append(same)
        print(both)

    return step, model, optimizer, lambda: history


ALL = (
    group_kept_in_a_variable,
    dict_kept_elsewhere,
    fresh_dict,
    graph_used_after,
    raises_after,
    raises_before,
    another_branch_later,
    changes_what_the_middle_reads,
    unhooked_twice,
)


def ended(
    make: Callable[[], Made], capsys: pytest.CaptureFixture[str], scheduled: bool
) -> tuple[list[str], str, list[str], Any]:
    step, model, optimizer, state = make()
    random.seed(5)
    torch.manual_seed(5)
    batches = [torch.randn(3, 4) for _ in range(CALLS)]
    call = hocket.schedule(step, model, optimizer, guard=False, cache=False) if scheduled else step
    seen = []
    for batch in batches:
        try:
            seen.append(repr(call(batch)))
        except Exception as error:  # noqa: BLE001  # compared
            seen.append(f"{type(error).__name__}: {error}")
    weights = [repr(p.tolist()) for p in model.parameters()]
    return seen, capsys.readouterr().out, weights, (repr(state()), random.random())


@pytest.mark.parametrize("make", ALL)
def test_it_ends_where_eager_ends(make: Callable[[], Made], capsys: pytest.CaptureFixture[str]) -> None:
    eager, planned = ended(make, capsys, False), ended(make, capsys, True)
    for one, other in zip(eager, planned, strict=True):
        assert one == other


def test_strict_raises_where_there_is_nothing_to_plan() -> None:
    step, model, optimizer, _ = graph_used_after()
    fast = hocket.schedule(step, model, optimizer, strict=True, cache=False)
    errors = []
    for _ in range(20):
        try:
            fast(torch.randn(3, 4))
        except CaptureError as error:
            errors.append(str(error))
    assert errors
    assert "print" in errors[0]


def test_strict_is_content_with_a_planned_middle() -> None:
    step, model, optimizer, _ = fresh_dict()
    fast = hocket.schedule(step, model, optimizer, strict=True, guard=False, cache=False)
    for _ in range(20):
        fast(torch.randn(3, 4))
    assert fast.verdict == "planned"


def test_a_refusal_is_said_once_and_names_the_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    step, model, optimizer, _ = graph_used_after()
    fast = hocket.schedule(step, model, optimizer, cache=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            fast(torch.randn(3, 4))
    assert fast.verdict == "eager"
    assert "print" in fast.why
    assert len([record for record in caplog.records if "stays eager" in record.message]) == 1
