"""What the system has in memory already is read at once: to wait for it takes longer than to copy it.

Holding a tensor until it arrives costs some 45 us of Python, and its bytes come out of the page cache at gigabytes per
second, on a core that the forward could use. So what a file of the disk has there is read by the call, without holding
anything, until something is found missing (``preadv`` with ``RWF_NOWAIT``); the rest streams.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hocket.loading.landing import CHUNK_BYTES, Landing
from hocket.loading.sources import DiskSource
from hocket.loading.weights import StoredTensor

__all__ = ["read_cached"]

# The call is to return soon: copying so much takes a quarter of a second.
MAX_BYTES = 1 << 30

# Buffers of one system call; its own limit is 1,024.
MAX_TOGETHER = 256


def read_cached(landings: Mapping[str, tuple[StoredTensor, Landing]]) -> frozenset[str]:
    """Read what is in memory already, as the files have it, up to the first byte that is not.

    Args:
        landings: for each name what is to be read, and where to; nothing, if it is more than `MAX_BYTES`.

    Returns:
        The names of those that have arrived; of all others nothing counts.
    """
    if sum(stored.entry.size_bytes for stored, _ in landings.values()) > MAX_BYTES:
        return frozenset()
    found: list[str] = []
    for names in _side_by_side({name: stored for name, (stored, _) in landings.items()}):
        stored, _ = landings[names[0]]
        source = stored.source
        if not isinstance(source, DiskSource):
            return frozenset(found)
        sizes = [landings[name][0].entry.size_bytes for name in names]
        buffers = [landings[name][1].buffer(0, size) for name, size in zip(names, sizes, strict=True)]
        try:
            count = source.read_now(stored.entry.offset, buffers)
        except OSError:
            return frozenset(found)  # who reads it again is told why
        if count < sum(sizes):
            return frozenset(found)
        with torch.inference_mode():  # as the thread that streams
            for name, size in zip(names, sizes, strict=True):
                landings[name][1].landed(0, size)
        found += names
    return frozenset(found)


def _side_by_side(tensors: Mapping[str, StoredTensor]) -> list[list[str]]:
    """Names in the order of their files, those of one row of bytes together, as far as one call may read them."""
    found: list[list[str]] = []
    size_bytes = 0
    before: StoredTensor | None = None
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
        size_bytes += stored.entry.size_bytes
        follows = before is not None and before.source is stored.source and before.entry.end == stored.entry.offset
        if follows and size_bytes <= CHUNK_BYTES and len(found[-1]) < MAX_TOGETHER:
            found[-1].append(name)
        else:
            found.append([name])
            size_bytes = stored.entry.size_bytes
        before = stored
    return found
