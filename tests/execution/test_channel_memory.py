"""Memory of channel lanes: parameters arrive in their own, and what crosses is held until it was delivered and read."""

import time

import pytest
import torch

from execution.parted import BATCHES, both_ways, half_of, in_thread, part_of, plan_of, training
from execution.probe import KINDS
from execution.wires import ManualChannel


def memory_of(channel, op) -> torch.UntypedStorage:
    """The memory that a transfer of the first step moves."""
    channel.wait_for(op, 1)
    return channel.begun[op, 1][0].untyped_storage()


def holders(memory: torch.UntypedStorage) -> int:
    """Number of references, the caller's included."""
    return torch._C._storage_Use_Count(memory._cdata)


def until(is_so) -> bool:
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_so()


@pytest.mark.parametrize("kind", KINDS)
def test_values_go_back_when_they_were_delivered_or_read_and_not_at_the_end(kind, started):
    _, part = part_of(False, lambda captured: half_of(captured, {"0", "2", ""}, "second"))
    channel = ManualChannel()
    planned = started(part, plan_of(part, "first", "second"), kind=kind, channels=both_ways("first", "second", channel))
    sends, recvs = ([op.name for op in part.graph.ops if op.role == role] for role in ("send", "recv"))
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    sent, received = memory_of(channel, sends[0]), memory_of(channel, recvs[0])
    assert min(holders(sent), holders(received)) > 1
    channel.arrive(sends[0], 1)  # nobody here reads it
    channel.begun.pop((sends[0], 1))
    assert until(lambda: holders(sent) == 1)
    channel.arrive(recvs[0], 1, torch.zeros(6, 5).double())
    channel.begun.pop((recvs[0], 1))
    channel.wait_for(sends[1], 1)
    assert until(lambda: holders(received) == 1)
    assert thread.is_alive(), "the step has not ended"
    channel.arrive(sends[1], 1)
    channel.arrive(recvs[1], 1)
    thread.join(20)
    assert isinstance(found[0], torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_delivered_first", [True, False])
def test_a_value_that_was_sent_stays_for_its_readers_here_and_for_the_transfer(kind, is_delivered_first, started):
    alone = training()
    alone.step(BATCHES[0])
    mine, part = part_of(False, lambda captured: half_of(captured, {"0", "1"}, "second"))
    channel = ManualChannel()
    planned = started(part, plan_of(part, "first", "second"), kind=kind, channels=both_ways("first", "second", channel))
    (send,), (recv,) = ([op.name for op in part.graph.ops if op.role == role] for role in ("send", "recv"))
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    sent = memory_of(channel, send)
    value = channel.begun[send, 1][0].clone()
    channel.wait_for(recv, 1)
    gradient = torch.full_like(channel.begun[recv, 1][0], 0.25)
    held_here = 2  # by this function, and by the tensor that the channel was given
    if is_delivered_first:
        channel.arrive(send, 1)
        time.sleep(0.02)  # who frees too early has the time to
        assert holders(sent) > held_here, "the backward op reads it"
        channel.arrive(recv, 1, gradient)
    else:
        channel.arrive(recv, 1, gradient)
        time.sleep(0.02)
        assert holders(sent) > held_here, "it is on its way"
        channel.arrive(send, 1)
    thread.join(20)
    assert found == [None]
    assert until(lambda: holders(sent) == held_here)
    assert torch.equal(channel.begun[send, 1][0], value)
    alone.optimizer.zero_grad()
    alone.model[:2](BATCHES[0][0]).backward(gradient)
    for parameter, other in zip(mine.model[0].parameters(), alone.model[0].parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
