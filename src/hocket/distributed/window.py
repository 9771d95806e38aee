"""How many chunks may be on their way: as many as an urgent value can wait for.

Two keep a slow link busy: while one is acknowledged the next one is on its way. On a fast link two take less time than
an acknowledgement does, which a busy processor sends late; so there it is what the link carries in 8 ms.
"""

from __future__ import annotations

from hocket.distributed.parcels import CHUNK_BYTES

__all__ = ["SendWindow"]

MIN_CHUNKS, MAX_CHUNKS = 2, 8
URGENT_WAITS_S = 0.008
# How much the last chunk counts in how long chunks take.
NEWEST_PART = 0.2


class SendWindow:
    """Follows acknowledgements.

    Attributes:
        num_chunks: how many may be on their way now.

    Example:
        >>> window = SendWindow()
        >>> for chunk in range(20):
        ...     window.acknowledged(CHUNK_BYTES, chunk * 0.001, more=True)
        >>> window.num_chunks
        7
    """

    def __init__(self) -> None:
        self.num_chunks = MIN_CHUNKS
        self._chunk_s = URGENT_WAITS_S
        self._last_s: float | None = None

    def acknowledged(self, size_bytes: int, now_s: float, *, more: bool) -> None:
        """A chunk has arrived; `more` if others are on their way, so that the next one says how long a chunk takes."""
        if self._last_s is not None and size_bytes == CHUNK_BYTES:
            self._chunk_s += NEWEST_PART * (now_s - self._last_s - self._chunk_s)
            self.num_chunks = max(MIN_CHUNKS, min(int(URGENT_WAITS_S / max(self._chunk_s, 1e-9)), MAX_CHUNKS))
        self._last_s = now_s if more else None
