"""Readers that hand out bytes at a rate."""

from __future__ import annotations

import io
import time
from typing import Any


class PacedReader:
    """Bytes at a rate: what is asked for is there as soon as a link of that rate has carried it."""

    name = "link"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        self.size = len(data)
        self._data = memoryview(data)
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def read_at(self, offset: int, length: int) -> memoryview:
        """At most `length` bytes from `offset` on."""
        found = self._data[offset : offset + length]
        self._free_s = max(self._free_s, time.perf_counter()) + len(found) / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return found


class PacedStream(io.RawIOBase):
    """The same, of what cannot seek."""

    name = "stream"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        super().__init__()
        self._reader = PacedReader(data, bytes_per_s)
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self._reader.read_at(self._at, len(target))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)
