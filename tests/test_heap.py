"""The heap is trimmed as often as there is something to be given back."""

from __future__ import annotations

import pytest

from hocket import heap
from hocket.heap import HeapTrimmer


def test_it_is_trimmed_each_time_so_much_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "trim_heap", lambda: trims.append(1))
    trimmer = HeapTrimmer(every_bytes=100)
    for made_bytes, expected in ((60, 0), (40, 0), (1, 1), (100, 1), (1, 2), (1000, 3)):
        trimmer.made(made_bytes)
        assert len(trims) == expected
