"""A planned step that raises in the middle: what the user's step does before that is done, and its error is eager's."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket

ONE = hocket.Machine.of(cores=1)


class Holder:
    calls = 0
    mean = torch.zeros(())


def built(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = Holder()
    held.calls, held.mean = 0, torch.zeros(())

    def step(batch):
        x, y = batch
        held.calls += 1
        if kind == "tensor":
            held.mean = 0.5 * held.mean + 0.5 * x.float().mean()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer, held


def outcome(call, batch):
    try:
        return float(call(batch).detach())
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize("bad", ["index", "target"])
def test_effects_before_the_op_that_raises_are_eager_s(kind, executor, bad):
    batches = [(torch.randint(6, (3,)), torch.randint(5, (3,))) for _ in range(4)]
    wrong = (batches[0][0] + 100, batches[0][1]) if bad == "index" else (batches[0][0], batches[0][1] + 100)
    eager, model, _, held = built(kind)
    step, other, optimizer, other_held = built(kind)
    options = {"guard": False, "planner": "serial", "machine": ONE, "executor": executor, "cache": False}
    with hocket.schedule(step, other, optimizer, **options) as fast:
        for n in range(40):
            batch = wrong if n in (20, 21, 30) else batches[n % 4]
            assert outcome(eager, batch) == outcome(fast, batch)
            assert (held.calls, float(held.mean)) == (other_held.calls, float(other_held.mean))
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one, two)
                assert (one.grad is None) == (two.grad is None)
        assert fast.verdict == "planned"


def test_step_that_has_written_before_it_raises_is_not_made_twice():
    """Batch norm has updated its statistics by then."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    good = (torch.randn(3, 4), torch.randint(5, (3,)))
    bad = (good[0], good[1] + 100)
    eager, model, _ = build()
    step, other, optimizer = build()
    with hocket.schedule(step, other, optimizer, guard=False, planner="serial", cache=False, machine=ONE) as fast:
        for n in range(30):
            batch = bad if n == 20 else good
            assert outcome(eager, batch) == outcome(fast, batch)
            for one, two in zip(model.buffers(), other.buffers(), strict=True):
                assert torch.equal(one, two)


SCALES = {
    "product": lambda k, j: j * k,
    "sum": lambda k, j: k + j,
    "order": lambda k, j: float(k < j) + k,
    "power": lambda k, j: k**j,
}


@pytest.mark.parametrize("other", ["x", None, [1.0], b"x", {}], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("use", SCALES)
def test_number_beside_what_is_none_raises_once_and_as_in_eager(use, other):
    """Also in the call that is recorded, whose numbers are followed: nothing is made twice for it."""

    def run(scheduled):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values, codes = {"k": 0.5, "j": 0.25}, []

        def step(batch):
            loss = model(batch).square().mean() * SCALES[use](values["k"], values["j"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values["k"] *= 0.9
            return loss.detach()

        def count(frame, event, argument):
            codes.extend([1] if frame.f_code is step.__code__ else [])

        fast = hocket.schedule(step, model, optimizer, cache=False, machine=ONE) if scheduled else step
        found = []
        for n in range(20):
            values["j"] = other if n in (3, 12) else 0.25
            begun = len(codes)
            sys.settrace(count if n < 8 else None)
            try:
                found.append(float(fast(torch.ones(3, 4))))
            except TypeError as error:
                found.append((type(error), str(error)))
            finally:
                sys.settrace(None)
            assert n >= 8 or len(codes) == begun + 1
            found.append(dict(values))
        return found

    assert run(scheduled=True) == run(scheduled=False)
