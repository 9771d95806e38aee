"""A planned step that raises in the middle: what the user's step does before that is done, and its error is eager's."""

from __future__ import annotations

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
