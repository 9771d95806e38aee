"""Who waits for what a process group has of a chunk: one of the two that hear of it, whichever comes second."""

from __future__ import annotations

from hocket.distributed.packets import ChunkInFlight, PacketTransfer


def test_a_chunk_that_was_sent_before_it_arrived_is_waited_for_by_who_hears_that_it_has():
    leaving, work = ChunkInFlight(0, PacketTransfer(1)), object()
    assert leaving.sent(work) is None
    assert leaving.acknowledged() is work
    assert leaving.work is None


def test_a_chunk_that_arrived_before_its_send_returned_is_waited_for_by_its_sender():
    leaving, work = ChunkInFlight(0, PacketTransfer(1)), object()
    assert leaving.acknowledged() is None
    assert leaving.sent(work) is work
    assert leaving.work is None
