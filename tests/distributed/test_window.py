"""How many chunks may be on their way, by when the ones before were acknowledged."""

from __future__ import annotations

import pytest

from hocket.distributed.parcels import CHUNK_BYTES
from hocket.distributed.window import SendWindow


def after(chunk_s: float, size_bytes: int = CHUNK_BYTES, more: bool = True) -> int:
    window = SendWindow()
    for chunk in range(60):
        window.acknowledged(size_bytes, chunk * chunk_s, more=more)
    return window.num_chunks


@pytest.mark.parametrize(("chunk_s", "chunks"), [(0.1, 2), (0.0052, 2), (0.0021, 3), (0.0001, 8), (0.0, 8)])
def test_as_many_as_the_link_carries_while_an_urgent_value_waits(chunk_s, chunks):
    assert after(chunk_s) == chunks


def test_pauses_and_small_chunks_say_nothing_of_the_link():
    assert after(0.0001, more=False) == 2
    assert after(0.0001, size_bytes=1024) == 2
