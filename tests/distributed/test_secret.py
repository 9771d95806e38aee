"""The shared secret of a job: ranks that do not know it get no further than the opening of a connection."""

import os
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from distributed.faulty import serve, work
from distributed.ranks import Ranks, free_port, listening, returned
from distributed.training import batches, training
from hocket.distributed.membership import connected, join
from hocket.distributed.packets import Packet
from hocket.distributed.store import JobStore, check_peer, opened
from hocket.errors import PeerError
from support.refusals import fails, refused

VALUE = Packet(("value",), (16,))


def set_secret(secret):
    os.environ.pop("HOCKET_JOB_SECRET", None)
    if secret is not None:
        os.environ["HOCKET_JOB_SECRET"] = secret


def carry(rank, say, *of_ranks):
    """Carry a value from rank 0 to rank 1."""
    set_secret(of_ranks[rank])
    store = opened("127.0.0.1", int(os.environ["MASTER_PORT"]), 20.0)
    wire = connected(store, "key", rank, f"rank {rank}", f"rank {1 - rank}", 20.0)
    wire.add(*(([VALUE], []) if rank == 0 else ([], [VALUE])))
    value = torch.zeros(2, dtype=torch.float64)
    store.set(f"added {rank}", "")
    store.wait([f"added {1 - rank}"])
    if rank == 0:
        wire.put("value", torch.tensor([2.0, 3.0], dtype=torch.float64))
    else:
        wire.get("value", value)
    wire.close()
    return value.tolist()


@pytest.mark.parametrize("secret", [None, "a", "long and with \u00fc " * 20])
def test_ends_with_the_same_secret_are_connected(secret):
    assert returned(carry, 2, secret, secret)[1] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("secrets", "reason"),
    [
        (("one", "two"), "in the store of the job is signed with another HOCKET_JOB_SECRET"),
        (("one", None), "the job has a HOCKET_JOB_SECRET, and this process has none"),
        ((None, "one"), "in the store of the job is not signed with the HOCKET_JOB_SECRET"),
    ],
)
def test_ends_with_different_secrets_refuse_each_other(secrets, reason):
    with Ranks(carry, 2, *secrets) as ranks:
        ends = [ranks.raised(rank) for rank in range(2)]
    assert all(text.startswith("PeerError: ") for text in ends), ends
    assert any(reason in text for text in ends), ends


def test_an_empty_secret_is_refused(monkeypatch):
    monkeypatch.setenv("HOCKET_JOB_SECRET", "")
    refused("HOCKET_JOB_SECRET is empty", opened, "127.0.0.1", 1, 1.0)


def reflect(rank, say):
    """Rank 1 knows no secret, and answers with all that it has received."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    if rank == 0:
        check_peer(group, 0, "key", b"secret", "rank 0", "rank 1")
        return
    for size in (33, 32):
        message = torch.zeros(size, dtype=torch.uint8)
        group.recv([message], 0, 0).wait()
        group.send([message], 0, 0).wait()
    store.wait(["refused"])


def test_reflected_answers_prove_nothing():
    with Ranks(reflect, 2) as ranks:
        kind, text = ranks.end(0)
        ranks.store.set("refused", "")
        assert (kind, text) == ("raised", "PeerError: rank 0 refuses rank 1: it has another HOCKET_JOB_SECRET")
        assert ranks.end(1)[0] == "returned"


@pytest.mark.parametrize("value", [b"", b"null", b"hocket signed\0" + bytes(40), b"the value of another key"])
def test_values_that_a_stranger_puts_into_the_store_are_refused(value):
    plain = HashStore()
    store = JobStore(plain, "127.0.0.1", b"secret")
    store.set("other", "the value of another key")
    store.set("key", "value")
    assert store.get("key") == b"value"
    plain.set("key", plain.get("other") if value.startswith(b"the value") else value)
    fails(PeerError, r"'key' in the store of the job is .*signed with .*HOCKET_JOB_SECRET", store.get, "key")


def test_the_store_and_the_connections_listen_at_the_address_of_the_job_alone():
    places = [place for each in returned(listen, 2, free_port()) for place in each]
    assert len(places) >= 3  # the store, and both ends of a wire
    assert {place.partition(":")[0] for place in places} == {"0100007F"}, "127.0.0.1, by its last byte first"


def listen(rank, say, port):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    membership = join(0, 20.0)
    wires = membership.wires()
    found = listening()
    if rank == 0:  # the store ends with this process
        membership.announced("looked", by=1)
    else:
        membership.announce("looked", True)
    membership.leave(wires)
    return found


def train(rank, say, *of_ranks):
    set_secret(of_ranks[rank])
    of = training("adam")
    if rank == 1:
        return serve(of, 30.0)
    with work(of, 30.0) as fast:
        for batch in batches(rank, 2):
            fast(batch)
    return fast.steps


@pytest.mark.parametrize("of_server", ["secret", "another"])
def test_a_job_trains_with_one_secret_only(of_server):
    with Ranks(train, 2, "secret", of_server) as ranks:
        ends = [ranks.end(rank) for rank in range(2)]
    if of_server == "secret":
        assert ends == [("returned", 2)] * 2
    else:
        assert all(kind == "raised" for kind, _ in ends), ends
        assert any("HOCKET_JOB_SECRET" in text for _, text in ends), ends
