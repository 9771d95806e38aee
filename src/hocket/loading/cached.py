"""Read what is in the page cache at once: to wait for it takes longer than to copy it.

Holding a tensor until it arrives costs some 45 us of Python, and the page cache delivers gigabytes per second. So the
call to `hocket.load` reads the cached part of a file on disk itself, up to the first page that is missing (``preadv``
with ``RWF_NOWAIT``), and the remaining tensors stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hocket.loading.landing import CHUNK_BYTES, MAX_TOGETHER, Landing
from hocket.loading.sources import DiskSource
from hocket.loading.weights import StoredTensor

# The call must return soon: copying this many bytes takes a quarter of a second.
MAX_BYTES = 1 << 30


def read_cached(landings: Mapping[str, tuple[StoredTensor, Landing]]) -> frozenset[str]:
    """Read cached tensors in the order of their files, up to the first byte that is not cached.

    Args:
        landings: maps each name to the tensor to read and the memory to read it into. Nothing is read if they have more
            than `MAX_BYTES` together.

    Returns:
        The names of the tensors that have arrived. The memory of all others is undefined.
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
            return frozenset(found)  # the thread that reads it again reports the error
        if count < sum(sizes):
            return frozenset(found)
        with torch.inference_mode():  # as the thread that streams
            for name, size in zip(names, sizes, strict=True):
                landings[name][1].landed(0, size)
        found += names
    return frozenset(found)


def _side_by_side(tensors: Mapping[str, StoredTensor]) -> list[list[str]]:
    """Group names in the order of their files, adjacent tensors together, up to the limits of one call."""
    found: list[list[str]] = []
    size_bytes = 0
    before: StoredTensor | None = None
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
        size_bytes += stored.entry.size_bytes
        follows = before is not None and before.touches(stored)
        if follows and size_bytes <= CHUNK_BYTES and len(found[-1]) < MAX_TOGETHER:
            found[-1].append(name)
        else:
            found.append([name])
            size_bytes = stored.entry.size_bytes
        before = stored
    return found
