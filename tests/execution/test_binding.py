"""A bound step reads and puts back natively what `Captured.begin` and `finish` do, whatever changed between."""

import copy
import math

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same, everything, named_leaves, serial, twins
from hocket.errors import StaleCaptureError
from hocket.execution.native import NativeLanes
from hocket.execution.threads import ThreadLanes
from hocket.job import Job
from hocket.native import available
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from support.refusals import fails
from support.steps import update

pytestmark = pytest.mark.skipif(not available(), reason="the native core cannot be built here")


def small(kind=torch.optim.Adam) -> Job:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = kind(model.parameters(), lr=0.05)
    batches = [{"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,))} for _ in range(3)]

    def step(batch):
        optimizer.zero_grad()
        scores = model(batch["x"])
        loss = nn.functional.cross_entropy(scores, batch["y"])
        loss.backward()
        optimizer.step()
        return {"loss": loss, "scores": [scores, 1.5], "loss as a number": loss.item()}

    return Job(step, model, optimizer, batches)


class Pair:
    """Two equal jobs, one stepped eagerly, one by lanes: those that are bound are native."""

    def __init__(self, make=small, lanes=NativeLanes) -> None:
        self.jobs = twins(make)
        for job in self.jobs.both():
            torch.manual_seed(1)
            job.step(job.batch(0))
        planned = self.jobs.planned
        self.captured = capture(planned.step, planned.model, planned.optimizer, planned.batch(0), split=False)
        self.lanes = lanes(self.captured, serial(self.captured))
        self.number = 0
        for _ in range(3):
            self.check()

    def check(self) -> None:
        self.number += 1
        results = []
        for run, job in ((self.jobs.eager.step, self.jobs.eager), (self.lanes, self.jobs.planned)):
            torch.manual_seed(self.number)
            results.append(run(job.batch(self.number)))
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]))
        assert_same(everything(self.jobs.eager), everything(self.jobs.planned))

    def both(self, change) -> None:
        for job in self.jobs.both():
            torch.manual_seed(7)
            change(job)


def _reloaded(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    for each in state["state"].values():
        each["exp_avg"] += 0.1
    job.optimizer.load_state_dict(state)


def _other_momenta(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def _exchanged_buffer(job: Job) -> None:
    job.model[1].running_mean = torch.full((6,), 0.25)


def _step_counts(job: Job) -> None:
    for number, state in enumerate(job.optimizer.state.values()):
        state["step"] = torch.tensor(20.0 + number)


CHANGES = {
    "nothing": lambda job: None,
    "a rate": lambda job: job.optimizer.param_groups[0].update(lr=0.2),
    "betas": lambda job: job.optimizer.param_groups[0].update(betas=(0.5, 0.75)),
    "another dict of options": lambda job: job.optimizer.param_groups.__setitem__(
        0, job.optimizer.param_groups[0] | {"lr": 0.3}
    ),
    "a loaded state": _reloaded,
    "a loaded model": lambda job: job.model.load_state_dict({k: 2 * v for k, v in job.model.state_dict().items()}),
    "other tensors in the state": _other_momenta,
    "step counts, each its own": _step_counts,
    "a buffer": _exchanged_buffer,
    "the data of a parameter": lambda job: setattr(job.model[0].weight, "data", torch.randn(6, 4)),
    "no gradients": lambda job: job.optimizer.zero_grad(),
    "a gradient of the user's own": lambda job: setattr(job.model[0].weight, "grad", torch.ones(6, 4)),
    "a batch put together otherwise": lambda job: job.batches.append(dict(reversed(job.batch(0).items()))),
}


@pytest.mark.parametrize("lanes", [NativeLanes, ThreadLanes])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_finds_what_changed(change, lanes):
    pair = Pair(lanes=lanes)
    pair.both(CHANGES[change])
    for _ in range(3):
        pair.check()


def test_a_number_of_another_type_is_another_step():
    pair = Pair()
    pair.both(lambda job: job.optimizer.param_groups[0].update(lr=1))
    fails(StaleCaptureError, "another type", pair.lanes, pair.jobs.planned.batch(1))


def test_no_python_reads_or_puts_back(monkeypatch):
    pair = Pair()
    monkeypatch.setattr(Captured, "begin", None)
    monkeypatch.setattr(Captured, "finish", None)
    pair.check()
    pair.both(CHANGES["a rate"])
    pair.check()


def test_closed_lanes_are_bound_again(monkeypatch):
    pair = Pair()
    pair.lanes.close()
    pair.check()
    pair.check()
    monkeypatch.setattr(Captured, "begin", None)
    pair.check()


def test_a_guard_that_fails_leaves_everything_as_it_was():
    pair = Pair()
    pair.both(lambda job: job.optimizer.param_groups[0].update(weight_decay=0.1))  # Adam branches on it
    before = [(name, copy.deepcopy(value)) for name, value in everything(pair.jobs.planned)]
    with pytest.raises(StaleCaptureError):
        pair.lanes(pair.jobs.planned.batch(1))
    assert_same(before, everything(pair.jobs.planned))


def test_state_that_is_gone_is_said():
    pair = Pair()
    pair.jobs.planned.optimizer.state.clear()
    fails(StaleCaptureError, "there is no", pair.lanes, pair.jobs.planned.batch(1))


def test_an_op_that_fails_is_named_and_the_next_step_runs():
    pair = Pair()
    bad = dict(pair.jobs.planned.batch(0), y=torch.full((5,), 9))
    with pytest.raises(IndexError) as raised:
        pair.lanes(bad)
    assert "of the planned step" in "".join(raised.value.__notes__)
    pair.lanes(pair.jobs.planned.batch(0))


@pytest.mark.parametrize("count", [3, 4, 100, 2**40, 2**62])
def test_numbers_are_computed_as_python_does(count):
    def make() -> Job:
        job = small(torch.optim.SGD)
        parameters = list(job.model.parameters())

        class Scheduled(torch.optim.SGD):
            def step(self, closure=None):
                number = self.param_groups[0]["count"]
                scale = (number * 3 - 1) / 7 + 0.5**number + round(math.sqrt(number), 2) + number // 2
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.add_(parameter.grad, alpha=-scale * 1e-20)

        optimizer = Scheduled(parameters, lr=0.1)
        optimizer.param_groups[0]["count"] = 3

        def step(batch):
            loss = update(optimizer, job.model(batch["x"]).square().mean())
            return loss, optimizer.param_groups[0]["count"] * 2

        return Job(step, job.model, optimizer, job.batches)

    pair = Pair(make)
    pair.both(lambda job: job.optimizer.param_groups[0].update(count=count))
    for _ in range(2):
        pair.check()
