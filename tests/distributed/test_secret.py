"""The shared secret of a job: ranks that do not know it get no further than the opening of a connection."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from distributed.faulty import serve, work
from distributed.ranks import Ranks
from distributed.training import batches, training
from hocket.distributed.membership import connected
from hocket.distributed.packets import Packet
from hocket.distributed.secret import check_peer
from hocket.errors import InputError

VALUE = Packet(("value",), (16,))


def set_secret(secret):
    os.environ.pop("HOCKET_JOB_SECRET", None)
    if secret is not None:
        os.environ["HOCKET_JOB_SECRET"] = secret


def carry(rank, say, *of_ranks):
    """Carry a value from rank 0 to rank 1."""
    set_secret(of_ranks[rank])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
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
    with Ranks(carry, 2, secret, secret) as ranks:
        assert ranks.returned()[1] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("secrets", "reason"),
    [
        (("one", "two"), "another HOCKET_JOB_SECRET"),
        (("one", None), "rank 1 has no HOCKET_JOB_SECRET, and rank 0 has one"),
        ((None, "one"), "rank 0 has no HOCKET_JOB_SECRET, and rank 1 has one"),
    ],
)
def test_ends_with_different_secrets_refuse_each_other(secrets, reason):
    with Ranks(carry, 2, *secrets) as ranks:
        ends = [ranks.end(rank) for rank in range(2)]
    assert all(kind == "raised" and text.startswith("PeerError: ") for kind, text in ends), ends
    assert any(reason in text for _, text in ends), ends


def test_an_empty_secret_is_refused(monkeypatch):
    monkeypatch.setenv("HOCKET_JOB_SECRET", "")
    with pytest.raises(InputError, match="HOCKET_JOB_SECRET is empty"):
        connected(HashStore(), "key", 0, "rank 0", "rank 1", 1.0)


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
        assert any("another HOCKET_JOB_SECRET" in text for _, text in ends), ends
