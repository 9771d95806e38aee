"""Steps of which the middle alone can be planned: strict schedules, and the reason where there is no middle.

That they end as in eager: tests/loops/parted.py.
"""

import copy
import logging
import sqlite3
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import CaptureError
from support.steps import update


def graph_used_after() -> tuple[Callable[[Any], Any], nn.Module, torch.optim.Optimizer]:
    """Backward follows a print of a tensor: there is no middle that could be planned."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x[:, :2])
        print("forward", loss)
        return update(optimizer, loss)

    return step, model, optimizer


def test_strict_raises_where_there_is_nothing_to_plan() -> None:
    step, model, optimizer = graph_used_after()
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
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        info: dict[str, Any] = {"size": len(x)}
        info["loss"] = update(optimizer, F.mse_loss(model(x), x[:, :2])).item()
        print(info)

    fast = hocket.schedule(step, model, optimizer, strict=True, guard=False, cache=False)
    for _ in range(20):
        fast(torch.randn(3, 4))
    assert fast.verdict == "planned"


def test_a_refusal_is_said_once_and_names_the_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    step, model, optimizer = graph_used_after()
    fast = hocket.schedule(step, model, optimizer, cache=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            fast(torch.randn(3, 4))
    assert fast.verdict == "eager"
    assert "print" in fast.why
    assert len([record for record in caplog.records if "stays eager" in record.message]) == 1


def test_a_reason_is_not_about_the_way_in_which_a_step_was_divided() -> None:
    """The update is a function that is given what the step's closure holds."""
    model, held = nn.Linear(4, 2), {"settings": SimpleNamespace(scale=1.0)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def updated(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return round(loss.item(), 3)

    def step(x: torch.Tensor) -> float:
        loss = held["settings"].scale * F.mse_loss(model(x), x[:, :2])
        return updated(optimizer, loss)

    fast = hocket.schedule(step, model, optimizer, guard=False, machine=hocket.Machine.of(cores=1), cache=False)
    for number in range(200):
        if number % 4 == 3:
            held["settings"] = SimpleNamespace(scale=1.0 + number)
        fast(torch.randn(3, 4))
    assert fast.verdict == "eager"
    assert "still changes" in fast.why
    assert "SGD" not in fast.why


def test_a_reason_is_not_about_what_a_first_part_gives() -> None:
    """A weight is found before the batch is fetched, and so is given to what runs the ops."""
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = SimpleNamespace(net=model, batches=iter([torch.randn(3, 4) for _ in range(40)]), moved=0.0)

    def step(_: int) -> None:
        weight = own.net[0].weight
        x = next(own.batches)
        before = weight.detach().clone()
        update(optimizer, F.mse_loss(own.net(x), x[:, :2]))
        own.moved = (weight.detach() - before).norm().item()

    fast = hocket.schedule(step, model, optimizer, guard=False, machine=hocket.Machine.of(cores=1), cache=False)
    for number in range(40):
        fast(number)
    assert fast.verdict == "eager"
    assert "own.batches" in fast.why
    assert "of its batch" not in fast.why


def test_a_reason_about_the_middle_names_a_line_of_the_step_and_is_said_once() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> float:
        loss = F.mse_loss(model(batch[0]), batch[0][:, :2])
        update(optimizer, loss)
        print(round(loss.item(), 3))
        return loss.item()

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False)
    for _ in range(20):
        fast((torch.randn(3, 4), {"a set"}))
    assert fast.verdict == "eager"
    assert fast.why.count("holds a builtins.set") == 1
    assert f"test_parts.py:{step.__code__.co_firstlineno}" in fast.why


def test_a_reason_says_nothing_about_the_middle_that_stands_in_it_already() -> None:
    """More than are named keep the whole and the middle eager."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = [sqlite3.connect(":memory:") for _ in range(8)]

    def step(x: torch.Tensor) -> None:
        update(optimizer, F.mse_loss(model(x), x[:, :2]) * len(tables))
        print(tables[0])

    fast = hocket.schedule(step, model, optimizer, cache=False)
    for _ in range(20):
        fast(torch.randn(3, 4))
    assert "tables[0] is a sqlite3.Connection" in fast.why
    assert "with that left out" not in fast.why


def test_a_reason_about_the_middle_is_not_what_another_part_gives_it() -> None:
    """The lists that are made first are part of the middle's batch in one way to divide the step, and grow in it."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        sizes, losses = list[int](), list[torch.Tensor]()
        for part in x.chunk(2):
            sizes.append(len(part))
            loss = F.mse_loss(model(part), copy.deepcopy(part[:, :2] + 1))
            losses.append(update(optimizer, loss).detach())
        print(sizes)

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False)
    for _ in range(40):
        fast(torch.randn(64, 4))
    assert "takes a tensor out of torch's sight" in fast.why
    assert "into its batch" not in fast.why
