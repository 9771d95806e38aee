"""Ranks that never come, a store whose host exits, and a port that another program has: each named, in time."""

import os
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from distributed.ranks import Ranks, free_port
from hocket.distributed.membership import Membership, join
from hocket.errors import PeerError
from support.refusals import fails


def waiting(rank, say, port, timeout_s, is_torchruns="False"):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": is_torchruns}
    join(0, timeout_s).meet("here")


def test_ranks_that_never_come_are_named_by_all_others():
    port = free_port()
    with Ranks(waiting, 3, port, 2.0) as ranks:
        ranks.signal(2)
        ends = [ranks.raised(rank, 30) for rank in (0, 1)]
    for rank, text in enumerate(ends):
        assert text.startswith(f"PeerError: rank {rank} "), text
        assert "rank 2" in text
        assert "\n" not in text


def test_without_the_rank_that_keeps_the_store_the_others_say_so():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=2))
    membership = Membership(1, 3, 0, client, 2.0)
    del store
    for wait in (
        lambda: membership.meet("here"),
        lambda: membership.announced("description", 0),
        lambda: membership.announce("rate", 1.0),
        lambda: membership.wait_for({"hocket/x": 2}),
    ):
        fails(PeerError, "rank 1 has lost the store of the job", wait)
    assert membership.why_ended() is None


@pytest.mark.parametrize("is_torchruns", ["True", "False"])
def test_a_port_that_another_program_has_is_named_in_time(is_torchruns):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Ranks(waiting, 2, port, 1.0, is_torchruns) as ranks:
            ends = [ranks.raised(rank, 20) for rank in (0, 1)]
    for rank, text in enumerate(ends):
        assert text.startswith(f"PeerError: rank {rank} "), text
        assert f"the store of the job at 127.0.0.1:{port}: " in text
