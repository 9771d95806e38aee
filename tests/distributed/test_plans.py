"""The measurements and orders that a worker's plan stands on.

Channels over wires, with a wire that delivers when the test says so.
"""

from types import SimpleNamespace

import pytest
import torch

from hocket.distributed import plans
from hocket.distributed.channels import PullChannel, PushChannel
from hocket.distributed.job import PROBE_BYTES
from hocket.errors import ExecutionError, PeerError
from hocket.ir import Plan
from support.refusals import fails


class SlowWire:
    """Its transfers take a number of seconds by a clock that only they move."""

    def __init__(self, clock, transfers_s):
        self.clock, self.left_s = clock, list(transfers_s)

    def receive(self, name, tensor, epoch, done):
        self.clock[0] += self.left_s.pop(0)
        done(None)


@pytest.mark.parametrize("late_s", [(0.0, 0.0), (5.0, 0.0), (5.0, 3.0)])
def test_a_server_that_is_late_does_not_count_as_a_slow_link(late_s, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(plans.time, "perf_counter", lambda: clock[0])
    wire = SlowWire(clock, [late_s[0] + 0.5, late_s[1] + 0.5, 0.5])
    made = SimpleNamespace(membership=SimpleNamespace(is_worker=True), wires={0: wire})
    assert plans.link_rates(made) == [PROBE_BYTES / 0.5]
    assert not wire.left_s


def told(says):
    membership = SimpleNamespace(num_servers=2, name="worker {}".format, announced=lambda key, by: says)
    return plans.announced_plan(SimpleNamespace(membership=membership))


def test_what_rank_0_says_is_looked_at():
    job = told({"plan": str(Plan(())), "chunk_bytes": [16384, 131072]})
    assert job.chunk_bytes == (16384, 131072)
    assert job.plan == Plan(())


@pytest.mark.parametrize(
    "says",
    [
        [],
        "plan",
        {"chunk_bytes": [16384, 16384]},
        {"plan": "", "chunk_bytes": 16384},
        {"plan": "", "chunk_bytes": [16384]},
        {"plan": "", "chunk_bytes": [16384, 1]},
        {"plan": "", "chunk_bytes": [16384, 16384.0]},
        {"plan": 7, "chunk_bytes": [16384, 16384]},
    ],
    ids=str,
)
def test_what_is_no_plan_is_a_fault_of_rank_0(says):
    fails(PeerError, "worker 0 announced no plan with chunk sizes for 2 servers", told, says)


class HeldWire:
    def __init__(self) -> None:
        self.sent: list = []

    def send(self, name, tensor, epoch, done) -> None:
        self.sent.append((name, tensor, epoch, done))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_gradient_that_is_written_before_it_was_delivered_is_an_error(is_written):
    wire, told = HeldWire(), []
    gradient = torch.ones(3)
    PushChannel(wire).begin("push:w.grad", gradient.detach(), 1, told.append)
    assert not told
    if is_written:
        gradient.zero_()  # what a `zero_grad(set_to_none=False)` between two steps does
    wire.sent[0][3](None)
    (error,) = told
    if is_written:
        assert isinstance(error, ExecutionError)
        assert "'push:w.grad': the gradient was written between two steps" in str(error)
    else:
        assert error is None


def test_a_parameter_that_is_written_after_it_arrived_is_an_error():
    wire, told = HeldWire(), []
    wire.receive = wire.send
    weight = torch.ones(3)
    channel = PullChannel(wire, ["pull:w"], ["pull:w"])
    for epoch in (1, 2):
        channel.begin("pull:w", weight.detach(), epoch, told.append)
        weight.add_(1)  # arrives
        wire.sent.pop()[3](None)
    weight.clamp_(0)  # between two steps
    channel.begin("pull:w", weight.detach(), 3, told.append)
    assert told[:2] == [None, None]
    assert "'pull:w': it was written between two steps" in str(told[2])
    assert not wire.sent


def test_what_fails_on_the_way_is_told_as_it_is():
    wire, told, failure = HeldWire(), [], ConnectionResetError("gone")
    gradient = torch.ones(3)
    PushChannel(wire).begin("push:w.grad", gradient, 1, told.append)
    gradient.zero_()
    wire.sent[0][3](failure)
    assert told == [failure]
