"""A wire between two processes: order at the sender, stamps at the receiver, what goes out between chunks, ends.

Who waits for what a process group has of a chunk: one of the two that hear of it, whichever comes second.
"""

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from distributed.ranks import Ranks, returned
from hocket.distributed.packets import ChunkInFlight, Packet, PacketTransfer, pack
from hocket.distributed.wire import Wire
from hocket.errors import PeerError

VALUES = {
    "bias": torch.arange(5.0),
    "count": torch.tensor(7),
    "weight": torch.randn(400_000, generator=torch.Generator().manual_seed(1)).double(),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "half": torch.arange(70_000).to(torch.bfloat16),
}
VALUE = Packet(("value",), (8,))
SIZES = {name: value.numel() * value.element_size() for name, value in VALUES.items()}


def wire_of(rank: int, *parcels: Packet, ordered: tuple[Packet, ...] = (), timeout_s: float = 20.0) -> Wire:
    """A wire on which rank 0 sends these; returns when both ends know them."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    timeout = timedelta(seconds=timeout_s)
    group, records = (ProcessGroupGloo(PrefixStore(of, store), rank, 2, timeout) for of in ("bytes", "records"))
    wire = Wire(group, records, rank, f"rank {rank}", f"rank {1 - rank}", timeout_s)
    for some, in_order in ((ordered, True), (parcels, False)):
        wire.add(*((some, ()) if rank == 0 else ((), some)), ordered=in_order)
    store.set(f"added {rank}", "")
    store.wait([f"added {1 - rank}"])
    return wire


def holders(tensor: torch.Tensor) -> int:
    """Number of tensors that share its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_left_to(count: int, tensor: torch.Tensor, timeout_s: float = 20.0) -> bool:
    """True if soon this number of tensors share its memory."""
    end_s = time.monotonic() + timeout_s
    while holders(tensor) != count and time.monotonic() < end_s:
        time.sleep(0.001)
    return holders(tensor) == count


def num_sockets() -> int:
    links = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    return sum("socket:" in link for link in links)


def all_done(count: int):
    """A callback for each of some transfers, and how to wait for them."""
    errors, over = [], threading.Event()

    def done(error):
        errors.append(error)
        if len(errors) == count:
            over.set()

    return done, lambda: over.wait(20) and not any(errors)


def carry(rank, say, order, steps):
    """Rank 0 sends in `order`; values are made ready, and asked for, in other orders."""
    before = num_sockets()
    wire = wire_of(rank, ordered=pack((name, SIZES[name]) for name in order))
    found = []
    for step in range(1, steps + 1):
        done, wait = all_done(len(VALUES))
        if rank == 0:
            sent = {name: value.clone() for name, value in VALUES.items()}
            held = holders(sent["weight"])
            for name in sorted(sent):
                wire.send(name, sent[name], step, done)
            assert wait()
            # The acknowledgment may come before the sending thread has let go of its last chunk.
            assert is_left_to(held, sent["weight"]), "what was delivered is the sender's alone"
        else:
            memory = {name: torch.zeros_like(value) for name, value in VALUES.items()}
            for name in sorted(VALUES, reverse=True):
                wire.receive(name, memory[name], step, done)
            assert wait()
            assert all(torch.equal(memory[name], value) for name, value in VALUES.items())
            found.append(wire.arrived[step])
    wire.close()
    assert not [thread for thread in threading.enumerate() if "hocket-wire" in thread.name]
    del wire
    gc.collect()
    assert num_sockets() == before
    return found


@pytest.mark.parametrize("turn", [1, -1], ids=["planned", "reversed"])
def test_values_arrive_whole_and_in_the_order_of_the_sender(turn):
    order = ["weight", "bias", "turned", "half", "count", "empty", "flags"][::turn]
    assert returned(carry, 2, order, 3) == [[], [order] * 3]


def overtake(rank, say):
    """A small value out of turn, while a large one is on its way."""
    wire = wire_of(rank, Packet(("small",), (1024,)), ordered=(Packet(("large",), (64 << 20,)),))
    memory = {"large": torch.zeros(64 << 20, dtype=torch.uint8), "small": torch.zeros(1024, dtype=torch.uint8)}
    done, wait = all_done(1)
    (wire.send if rank == 0 else wire.receive)("large", memory["large"], 1, done)
    if rank == 0:
        wire.put("small", memory["small"])
    else:
        wire.get("small", memory["small"])
        is_first = not wire.arrived
    assert wait()
    wire.close()
    return None if rank == 0 else is_first


def test_what_has_no_turn_goes_out_between_chunks():
    assert returned(overtake, 2) == [None, True]


def lose(rank, say, timeout_s):
    wire = wire_of(rank, VALUE, timeout_s=timeout_s)
    say("there")
    if rank == 0:
        time.sleep(60)
    with pytest.raises(PeerError) as found:
        wire.get("value", torch.zeros(1).double())
    with pytest.raises(PeerError):
        wire.get("value", torch.zeros(1).double())
    return str(found.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_or_silent_is_named(number):
    with Ranks(lose, 2, 1.5) as ranks:
        ranks.heard(0, "there")
        ranks.heard(1, "there")
        ranks.signal(0, number)
        kind, text = ranks.end(1)
        assert kind == "returned"
        assert text.startswith("rank 1 lost rank 0: ")


def leave(rank, say, reason):
    wire = wire_of(rank, VALUE)
    if rank == 0:
        wire.close(reason)
        return None
    with pytest.raises(PeerError) as found:
        wire.get("value", torch.zeros(1).double())
    wire.close()
    return str(found.value)


def test_a_peer_that_leaves_while_something_is_to_come():
    assert returned(leave, 2, "broken") == [None, "rank 1 lost rank 0: it has failed"]


def post_and_leave(rank, say):
    wire = wire_of(rank, VALUE)
    if rank == 0:
        wire.post("value", torch.tensor(3.0).double())
        wire.flush()
        wire.close()
        return wire._outgoing.transfers == {}
    time.sleep(0.3)  # the other one would have left by now
    value = torch.zeros(1).double()
    wire.get("value", value)
    wire.close()
    return value.item()


def test_who_flushes_a_wire_leaves_when_all_has_arrived():
    assert returned(post_and_leave, 2) == [True, 3.0]


def leave_without_it(rank, say):
    wire = wire_of(rank, VALUE)
    if rank == 1:
        wire.close()
        return None
    wire.post("value", torch.tensor(3.0).double())
    with pytest.raises(PeerError) as found:
        wire.flush()
    wire.close()
    return str(found.value)


def test_who_flushes_a_wire_is_told_that_the_peer_left_without_what_was_posted():
    with Ranks(leave_without_it, 2) as ranks:
        text, _ = ranks.returned()
        assert text in ("rank 0 lost rank 1: it has left", "rank 0: rank 1 has left")


def call_out(rank, say, record):
    wire = wire_of(rank, VALUE)
    if rank == 0:
        wire._records.tell(*record)
        time.sleep(2)
        return None
    with pytest.raises(PeerError) as found:
        wire.get("value", torch.zeros(1).double())
    return str(found.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((1, 5, 0, 1), r"rank 1 lost rank 0: it sent an unknown record: (1, 5, 0, 1)"),
        ((9, 0, 0, 1), r"rank 1 lost rank 0: it sent an unknown record: (9, 0, 0, 1)"),
        ((1, 0, 3, 1), "rank 1 lost rank 0: it sends 'value' for step 1, which was not requested"),
        ((1, 0, 0, 4), "rank 1 lost rank 0: it sends 'value' for step 4, which was not requested"),
    ],
)
def test_what_a_peer_says_is_not_believed(record, message):
    with Ranks(call_out, 2, record) as ranks:
        assert ranks.end(1) == ("returned", message)


class Broken:
    """A process group whose connection has just broken, which is not noticed yet."""

    def recv(self, *args):
        raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:5. This is typically caused by")


def ask_over_a_broken_connection(rank, say):
    wire, errors = wire_of(rank, VALUE), []
    if rank == 1:
        wire._group = Broken()
        wire.receive("value", torch.empty(1, dtype=torch.int64), 1, errors.append)
    else:
        wire._threads[0].join(20)  # until the other one is gone
    wire.close(timeout_s=0.5)
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_a_connection_that_broke_a_moment_ago_is_a_lost_peer():
    with Ranks(ask_over_a_broken_connection, 2) as ranks:
        assert ranks.end(1) == ("returned", ["PeerError: rank 1 lost rank 0: Connection closed by peer [10.0.0.1]:5"])


@pytest.mark.parametrize("events", [("sent", "acknowledged"), ("acknowledged", "sent")])
def test_a_chunk_is_waited_for_by_who_hears_last_that_it_is_through(events):
    leaving, work = ChunkInFlight(0, PacketTransfer(1)), object()
    heard = {"sent": lambda: leaving.sent(work), "acknowledged": leaving.acknowledged}
    assert heard[events[0]]() is None
    assert heard[events[1]]() is work
    assert leaving.work is None
