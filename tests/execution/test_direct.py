"""Calls that need nothing of Python train as eager does; whatever is out of the ordinary goes the usual way."""

import copy
import os

import pytest
import torch

import hocket
from equivalence.compare import assert_same, everything
from execution.test_binding import CHANGES, Pair, small
from hocket.autotune import variant
from hocket.native import available
from hocket.tracing.signature import Signatures

pytestmark = pytest.mark.skipif(not available(), reason="the native core cannot be built here")


class DirectPair(Pair):
    """The lanes of a `Pair`, called directly; `went` are the calls that were."""

    def __init__(self) -> None:
        self.went: list[bool] = []
        self.direct = None
        super().__init__()
        lanes, places = self.lanes, self.captured.trace.places
        self.native = lanes  # lanes that nobody holds are closed
        signatures = Signatures()
        while signatures.recognised is None:
            signatures.of(places, self.jobs.planned.batch(self.number))
        self.direct = lanes.binding.direct((signatures.recognised,), 5)
        self.lanes = self.call

    def call(self, batch):
        result = self.direct(batch)
        self.went.append(result is not NotImplemented)
        return self.captured.step(batch) if result is NotImplemented else result


@pytest.mark.parametrize("change", CHANGES)
def test_a_direct_call_finds_what_changed(change):
    pair = DirectPair()
    pair.check()
    pair.both(CHANGES[change])
    for _ in range(3):
        pair.check()
    assert pair.went[0]


def test_it_ends_after_so_many_calls_and_tells_their_times():
    pair = DirectPair()
    for _ in range(8):
        pair.check()
    assert pair.went == [True] * 5 + [False] * 3
    assert len(pair.direct.times_ms()) == 5
    assert min(pair.direct.times_ms()) > 0


def test_another_signature_changes_nothing():
    pair = DirectPair()
    before = [(name, copy.deepcopy(value)) for name, value in everything(pair.jobs.planned)]
    assert pair.direct({"x": torch.randn(7, 4), "y": torch.zeros(7, dtype=torch.int64)}) is NotImplemented
    pair.jobs.planned.model.eval()
    assert pair.direct(pair.jobs.planned.batch(0)) is NotImplemented
    pair.jobs.planned.model.train()
    assert_same(before, everything(pair.jobs.planned))
    pair.check()


def test_a_forked_child_has_no_lanes():
    pair = DirectPair()
    child = os.fork()
    if child == 0:
        os._exit(0 if pair.direct(pair.jobs.planned.batch(0)) is NotImplemented else 1)
    assert os.waitpid(child, 0)[1] == 0
    pair.check()


def _decided():
    """A schedule whose next calls are direct, and its job."""
    job = small()
    machine = hocket.Machine.of(cores=torch.get_num_threads())
    options = {"planner": "serial", "guard": False, "cache": False, "machine": machine}
    fast = hocket.schedule(job.step, job.model, job.optimizer, **options)
    for number in range(400):
        fast(job.batch(number))
        if fast._pool.active._direct is not None and fast._pool.current._auditor.audit.due > 300:
            return fast, job
    raise AssertionError(f"no call was direct: {fast.why}")


def test_a_schedule_calls_directly_between_audits():
    fast, job = _decided()
    audit = fast._pool.current._auditor.audit
    before = audit.num_steps
    for number in range(3 * variant.MAX_DIRECT):
        fast(job.batch(number))
    fast._pool.active._end_direct()
    assert audit.num_steps == before + 3 * variant.MAX_DIRECT
    fast.close()


def test_closed_lanes_are_not_called_directly():
    fast, job = _decided()
    fast.candidate.executor.close()
    assert torch.isfinite(fast(job.batch(0))["loss"])
    fast.close()
    assert torch.isfinite(fast(job.batch(0))["loss"])
    fast.close()


def test_an_error_names_its_op_and_the_next_call_trains():
    fast, job = _decided()
    with pytest.raises(IndexError) as raised:
        fast(dict(job.batch(0), y=torch.full((5,), 9)))
    assert "of the planned step" in "".join(raised.value.__notes__)
    for number in range(3):
        assert torch.isfinite(fast(job.batch(number))["loss"])
    fast.close()
