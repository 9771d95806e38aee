"""Branches on what a step computes: planned for the outcome that was recorded, made by eager for the other one."""

from __future__ import annotations

import itertools
import math
import operator
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import CaptureError
from hocket.tracing import capture
from hocket.tracing.recording.outcomes import _ARITHMETIC
from support.refusals import fails
from support.steps import update
from support.twins import Program, ran

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
    "a power": lambda loss: max(loss.item() ** 2, 0.5) ** 0.5 < 1e6,
    "a root": lambda loss: min(math.sqrt(abs(loss.item())), 2.0) <= 2,
    "a number of two": lambda loss: loss.item() == loss.item(),
    "math": lambda loss: math.isfinite(loss.item()),
    "math isnan": lambda loss: not (math.isnan(loss.item()) or math.isinf(loss.item())),
    "numpy": lambda loss: not np.isnan(loss.item()),
    "a whole number": lambda loss: (loss == loss).sum().item() > 0,
    "a whole number computed": lambda loss: 2 * torch.isnan(loss).sum().item() + 1 < 2,
    "a whole number's truth": lambda loss: bool((loss == loss).sum().item()),
    "a number's truth": lambda loss: bool(loss.item() * 0 == 0) or not loss.item(),
}


def asking(question) -> Program:
    """A step that draws, writes buffers and has gradients before it asks."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"left out": 0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if question(loss):
            update(optimizer, loss)
        else:
            state["left out"] += 1
        return loss.detach()

    def left():
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state(), state["left out"]]

    return Program(step, model, optimizer, state=left)


def batches(bad=BAD):
    def batch(number):
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        if number in bad:
            x[0, 0] = math.nan
        return [x, y]

    return batch


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_step_that_takes_the_other_branch_is_eager_s(question):
    programs = []

    def make():
        programs.append(asking(QUESTIONS[question]))
        return programs[-1]

    fast = ran(make, batches(), STEPS, planner="serial")
    assert fast.verdict == "planned", fast.why
    assert programs[0].state()[-1] == len(BAD)


@pytest.mark.parametrize(
    "options", [{"executor": "python"}, {"planner": "list", "machine": hocket.Machine.of(cores=2)}]
)
def test_on_threads_and_on_two_lanes(options):
    fast = ran(lambda: asking(QUESTIONS["isfinite"]), batches(), STEPS, **{"planner": "serial", **options})
    assert fast.verdict == "planned", fast.why


@pytest.mark.parametrize("num_rare", [4, 5, 8])
def test_the_branch_that_was_recorded_may_be_the_rare_one(num_rare):
    """It is recorded again, also where no step of the other one was verified, and then planned for the other one."""
    fast = ran(lambda: asking(QUESTIONS["isfinite"]), batches(range(num_rare)), STEPS, planner="serial")
    assert fast.verdict == "planned", fast.why


@pytest.mark.parametrize("function", [operator.pow, max, min, math.sqrt])
def test_an_op_has_the_bits_of_python_s_function(function):
    numbers = [0.0, math.inf, *(math.exp(random.uniform(-40, 40)) for _ in range(500))]
    for operands in itertools.product(numbers, *[[0.5, 1.5, 2.0]] * (function is not math.sqrt)):
        found = _ARITHMETIC[function](*(torch.tensor(each, dtype=torch.float64) for each in operands))
        assert found.item() == function(*operands), operands


def test_a_branch_that_changes_all_the_time_ends_eager():
    fast = ran(lambda: asking(lambda loss: bool(loss * 1e4 % 2 < 1)), batches(), 8 * STEPS, planner="serial")
    assert fast.verdict == "eager"
    assert "test_outcomes.py" in fast.why


def writes_much_before_it_asks(model, optimizer, batch):
    with torch.no_grad():
        MUCH.add_(1)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if loss.isnan():
        return loss.detach()
    return update(optimizer, loss)


def reads_a_whole_number(model, optimizer, batch):
    output = model(batch[0])
    loss = F.cross_entropy(output, batch[1]) * (1 + int(output.argmax()) % 2)
    return update(optimizer, loss)


MUCH = torch.zeros(2**19)


@pytest.mark.parametrize("body", [writes_much_before_it_asks, reads_a_whole_number])
def test_what_could_not_be_undone_stays_eager(body):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = hocket.schedule(lambda b: body(model, optimizer, b), model, optimizer, guard=False, cache=False, machine=ONE)
    for number in range(STEPS):
        fast(batches(())(number))
    assert fast.verdict == "eager"
    assert "data-dependent" in fast.why


def test_a_captured_step_has_no_branch():
    """A capture that runs by itself has no eager step to fall back to."""
    made, batch = asking(QUESTIONS["isfinite"]), batches(())(0)
    made.step(batch)
    fails(CaptureError, "data-dependent", capture, made.step, made.model, made.optimizer, batch)


@pytest.mark.parametrize("kind", [FloatingPointError, SystemExit, KeyboardInterrupt])
def test_what_the_other_branch_raises_is_raised_once(kind):
    raised = []

    def make():
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            if not math.isfinite(loss.item()):
                raised.append(kind("the loss is not finite"))
                raise raised[-1]
            return update(optimizer, loss).detach()

        return Program(step, model, optimizer, state=torch.get_rng_state, raises=(kind,))

    ran(make, batches((30,)), STEPS, planner="serial")
    assert [getattr(error, "__notes__", []) for error in raised] == [[], []]


def test_a_number_is_compared_with_one_that_changes():
    """Losses far above their running mean are left out, and hits are compared with a whole number."""

    def make() -> Program:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"mean": 1.0, "steps": 0, "left out": 0, "few": 0}

        def step(batch):
            state["steps"] += 1
            out = model(batch[0])
            loss = F.cross_entropy(out, batch[1])
            if (out.argmax(1) == batch[1]).sum().item() < state["steps"] - 1000 or loss.item() < state["mean"] - 100:
                state["few"] += 1
            if 3 * state["mean"] / (1 - 0.5 ** state["steps"]) < loss.item():
                state["left out"] += 1
                return None
            update(optimizer, loss)
            state["mean"] = 0.9 * state["mean"] + 0.1 * loss.item()
            return loss.detach()

        programs.append(state)
        return Program(step, model, optimizer, state=lambda: list(state.values()))

    def batch(number):
        return [torch.randn(5, 4) * (60 if number in BAD else 1), torch.randint(3, (5,))]

    programs = []
    fast = ran(make, batch, STEPS, planner="serial")
    assert fast.verdict == "planned", fast.why
    assert programs[1]["left out"] == len(BAD)
