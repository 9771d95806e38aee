"""Branches on what a step computes: planned for the outcome that was recorded, made by eager for the other one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import CaptureError
from hocket.tracing import capture

ONE = hocket.Machine.of(cores=1)
STEPS = 40
# Steps with a NaN in their batch: before there is a plan, after that, and two in a row.
BAD = (9, 25, 30, 31)

# Each is true of a finite loss.
QUESTIONS = {
    "isfinite": lambda loss: bool(torch.isfinite(loss)),
    "not isnan": lambda loss: not torch.isnan(loss),
    "any": lambda loss: not torch.isnan(loss.expand(3)).any(),
    "item of a bool": lambda loss: torch.isfinite(loss).item(),
    "a comparison": lambda loss: loss < 1e6,
    "compared with itself": lambda loss: loss == loss,
    "all close": lambda loss: torch.allclose(loss, loss),
    "equal": lambda loss: torch.equal(loss, loss),
    "a number": lambda loss: loss.item() < 1e6,
    "a number on the right": lambda loss: loss.item() < 1e6 and 2.5 > -loss.item(),  # noqa: SIM300
    "a number computed": lambda loss: abs(-loss.item() * 2 + 1) / 4 < 1e6,
    "a number of two": lambda loss: loss.item() == loss.item(),
    "math": lambda loss: math.isfinite(loss.item()),
    "math isnan": lambda loss: not (math.isnan(loss.item()) or math.isinf(loss.item())),
    "numpy": lambda loss: not np.isnan(loss.item()),
    "a whole number": lambda loss: (loss == loss).sum().item() > 0,
    "a whole number computed": lambda loss: 2 * torch.isnan(loss).sum().item() + 1 < 2,
    "a whole number's truth": lambda loss: bool((loss == loss).sum().item()),
    "a number's truth": lambda loss: bool(loss.item() * 0 == 0) or not loss.item(),
}


def built(question):
    """A step that draws, writes buffers and has gradients before it asks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"left out": 0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if question(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            state["left out"] += 1
        return loss.detach()

    return step, model, optimizer, state


def batches(bad=BAD):
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x, y = torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)
        if number in bad:
            x[0, 0] = math.nan
        yield x, y


def trained(question, bad=BAD, **options):
    """Results, state and verdict of a run. Without options it is eager."""
    step, model, optimizer, state = built(question)
    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False, **options) if options else step
    results = []
    for batch in batches(bad):
        results.append(fast(batch))
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    results += [p.detach() for p in (*model.parameters(), *model.buffers())]
    results.append(torch.get_rng_state())
    return results, state, fast


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_step_that_takes_the_other_branch_is_eager_s(question):
    expected, counted, _ = trained(QUESTIONS[question])
    found, counts, fast = trained(QUESTIONS[question], planner="serial", machine=ONE)
    assert fast.verdict == "planned", fast.why
    assert_same(found, expected)
    assert counts == counted == {"left out": len(BAD)}


@pytest.mark.parametrize(
    "options", [{"executor": "python"}, {"planner": "list", "machine": hocket.Machine.of(cores=2)}]
)
def test_on_threads_and_on_two_lanes(options):
    expected, counted, _ = trained(QUESTIONS["isfinite"])
    found, counts, fast = trained(QUESTIONS["isfinite"], **{"planner": "serial", "machine": ONE, **options})
    assert fast.verdict == "planned", fast.why
    assert_same(found, expected)
    assert counts == counted


def test_the_branch_that_was_recorded_may_be_the_rare_one():
    """It is recorded again, and then planned for the other one."""
    bad = tuple(range(8))
    expected, counted, _ = trained(QUESTIONS["isfinite"], bad)
    found, counts, fast = trained(QUESTIONS["isfinite"], bad, planner="serial", machine=ONE)
    assert fast.verdict == "planned", fast.why
    assert_same(found, expected)
    assert counts == counted == {"left out": 8}


def test_a_branch_that_changes_all_the_time_ends_eager():
    def question(loss):
        return bool(loss * 1e4 % 2 < 1)

    def run(fast):
        results = [fast(batch) for _ in range(8) for batch in batches()]
        return results

    step, model, optimizer, state = built(question)
    with hocket.schedule(step, model, optimizer, planner="serial", machine=ONE, guard=False, cache=False) as fast:
        found = run(fast)
        assert fast.verdict == "eager"
        assert "test_outcomes.py" in fast.why
    step, model, optimizer, counted = built(question)
    assert_same(found, run(step))
    assert state == counted


def writes_much_before_it_asks(model, optimizer, batch):
    with torch.no_grad():
        MUCH.add_(1)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if loss.isnan():
        return loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def reads_a_whole_number(model, optimizer, batch):
    output = model(batch[0])
    loss = F.cross_entropy(output, batch[1]) * (1 + int(output.argmax()) % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


MUCH = torch.zeros(2**19)


@pytest.mark.parametrize("body", [writes_much_before_it_asks, reads_a_whole_number])
def test_what_could_not_be_undone_stays_eager(body):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = hocket.schedule(lambda b: body(model, optimizer, b), model, optimizer, guard=False, cache=False, machine=ONE)
    for batch in batches(()):
        fast(batch)
    assert fast.verdict == "eager"
    assert "data-dependent" in fast.why


def test_a_captured_step_has_no_branch():
    """Who runs a capture has no eager step to fall back to."""
    step, model, optimizer, _ = built(QUESTIONS["isfinite"])
    batch = next(batches(()))
    step(batch)
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(step, model, optimizer, batch)


@pytest.mark.parametrize("kind", [FloatingPointError, SystemExit, KeyboardInterrupt])
def test_what_the_other_branch_raises_is_raised_once(kind):
    raised, notes = [], []

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            if not math.isfinite(loss.item()):
                raised.append(kind)
                raise kind("the loss is not finite")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model, optimizer

    def run(call, model):
        found = []
        for batch in batches((30,)):
            try:
                found.append(call(batch))
            except kind as error:
                notes.extend(getattr(error, "__notes__", ()))
        return [*found, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    step, model, optimizer = build()
    expected = run(step, model)
    step, model, optimizer = build()
    with hocket.schedule(step, model, optimizer, planner="serial", machine=ONE, guard=False, cache=False) as fast:
        assert_same(run(fast, model), expected)
    assert raised == [kind, kind]
    assert not notes
