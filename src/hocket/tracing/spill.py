"""Values of a step that lie in a file for the larger part: those that are needed last are spilled first (Belady 1966).

A step in float64 holds twice the memory of the training's own step. Values of the forward are read again in the
backward, in reverse order, and the order of all ops is known. So once the limit is exceeded, the values whose next
reader is farthest away are written to a temporary file, and read again before that reader runs. The pages of the file
belong to the kernel, which drops them under memory pressure.

Storages are spilled, since views share them: a spilled storage has no bytes, and its tensors stay as they are.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

# A storage that is smaller stays.
MIN_STORAGE_BYTES = 2**16
# A folder that is on a disk: the usual one for temporary files may be memory itself.
_ON_DISK = Path("/var/tmp")


@dataclass(eq=False)
class _Block:
    """A storage, the slots whose values are in it, and where in the file it has a place."""

    storage: torch.UntypedStorage
    size_bytes: int
    slots: set[int] = field(default_factory=set)
    offset: int | None = None
    is_out: bool = False


class ValueMemory:
    """Keeps the values of a step's slots within a limit.

    Args:
        limit_bytes: limit between two calls. One call may need more.
        uses: for each slot the calls that read or fill it, by their number, in order.
    """

    def __init__(self, limit_bytes: float, uses: Mapping[int, Sequence[int]]) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._uses = uses
        self._blocks: dict[int, _Block] = {}
        self._block_of: dict[int, _Block] = {}
        self._places: dict[int, list[int]] = {}  # places in the file that are free, by their size
        self._end = 0
        self._file: Any = None

    def add(self, slot: int, value: Any) -> None:
        self.drop(slot)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        if storage.nbytes() < MIN_STORAGE_BYTES or not storage.resizable():
            return
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._blocks[storage._cdata] = _Block(storage, storage.nbytes())
            self.held_bytes += block.size_bytes
        block.slots.add(slot)
        self._block_of[slot] = block

    def drop(self, slot: int) -> None:
        block = self._block_of.pop(slot, None)
        if block is None:
            return
        block.slots.discard(slot)
        if not block.slots:
            del self._blocks[block.storage._cdata]
            self.held_bytes -= 0 if block.is_out else block.size_bytes
            if block.offset is not None:
                self._places.setdefault(block.size_bytes, []).append(block.offset)

    def load(self, slots: Iterable[int]) -> None:
        for slot in slots:
            block = self._block_of.get(slot)
            if block is not None and block.is_out:
                block.storage.resize_(block.size_bytes)
                self._file.seek(block.offset)
                _all(self._file.readinto, block)
                block.is_out = False
                self.held_bytes += block.size_bytes

    def present(self, value: Any) -> Any:
        """A final value in memory, or pages of the file that are read as a tensor like it."""
        block = self._blocks.get(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
        if block is None or not block.is_out or block.offset is None:
            return value
        # Pages of our own once they are written: torch warns of memory that may not be written.
        pages = mmap.mmap(self._file.fileno(), block.size_bytes, offset=block.offset, access=mmap.ACCESS_COPY)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        with torch.no_grad():
            return value.detach().set_(storage, value.storage_offset(), value.shape, value.stride())

    def spill(self, at: int, limit_bytes: float = math.inf) -> None:
        """Spill values until the limit, or this one, holds after the call of this number. Unwritable ones stay."""
        limit_bytes = min(limit_bytes, self._limit_bytes) if math.isfinite(self._limit_bytes) else math.inf
        if self.held_bytes <= limit_bytes:
            return
        inside = [block for block in self._blocks.values() if not block.is_out]
        for block in sorted(inside, key=lambda block: self._next_use(block, at), reverse=True):
            if self.held_bytes <= limit_bytes:
                return
            try:
                self._write(block)
            except OSError as error:
                log.info("hocket: values of a step in float64 stay in memory: %s", error.strerror)
                self._limit_bytes = math.inf
                return

    def close(self) -> None:
        """Delete the file. Values that are spilled then are lost."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_use(self, block: _Block, at: int) -> float:
        """Return the first later call that needs a storage. Values needed only at the end come last."""
        found = math.inf
        for slot in block.slots:
            uses = self._uses.get(slot, ())
            place = bisect_right(uses, at)
            if place < len(uses):
                found = min(found, uses[place])
        return found

    def _write(self, block: _Block) -> None:
        if self._file is None:
            folder = _ON_DISK if os.access(_ON_DISK, os.W_OK) else None
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  # until `close`
        if block.offset is None:
            free = self._places.get(block.size_bytes)
            block.offset = free.pop() if free else self._end
            pages = -(-block.size_bytes // mmap.PAGESIZE)
            self._end = max(self._end, block.offset + pages * mmap.PAGESIZE)
        self._file.seek(block.offset)
        _all(self._file.write, block)
        block.storage.resize_(0)
        block.is_out = True
        self.held_bytes -= block.size_bytes


def _all(move: Any, block: _Block) -> None:
    """Read or write all bytes of a storage. Too few are an `OSError`."""
    view = memoryview((ctypes.c_char * block.size_bytes).from_address(block.storage.data_ptr())).cast("B")
    done = 0
    while done < block.size_bytes:
        moved = move(view[done:])
        if not moved:
            raise OSError(0, "a temporary file has not what was written")
        done += moved
