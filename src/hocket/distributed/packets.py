"""Packets of a wire: values that travel as one, their chunks, and the order in which a sender sends them.

A message costs tens of microseconds however small it is, and a step has dozens of values of a few bytes (biases,
statistics of batch norm). So small values that are neighbours in the order of a wire share a packet. Large values are
cut into chunks: an urgent value waits for the chunks in flight and for no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hocket.distributed.staging import bytes_of, device_of, from_host, memory_for, to_host
from hocket.errors import InputError
from hocket.execution.channels import Done

# A chunk is what a link carries in this time, within these bounds: the work per chunk limits them from below, and a
# fast link takes as long with larger ones.
CHUNK_US = 2000.0
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 16 * 1024, 128 * 1024
# Values up to the first size share packets up to the second.
SMALL_BYTES = 16 * 1024
MAX_PACK_BYTES = 64 * 1024
# Gloo's tags are C integers.
MAX_TAG = 2**31 - 1
# Offsets of values inside a packet: any dtype can be read there.
ALIGNMENT = 16
MAX_IN_FLIGHT = 4


@dataclass(frozen=True)
class Packet:
    """Values that travel as one."""

    members: tuple[str, ...]  # names of the values
    sizes: tuple[int, ...]  # bytes of each
    chunk_bytes: int = MAX_CHUNK_BYTES  # size of all chunks but the last

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        found, at = [], 0
        for size in self.sizes:
            found.append(at)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return tuple(found)

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1] + self.sizes[-1]

    @property
    def num_chunks(self) -> int:
        """The number of chunks: one empty chunk if there are no bytes. Computed, since a peer may claim any size."""
        return max(1, -(-self.size_bytes // self.chunk_bytes))

    def chunk(self, number: int) -> tuple[int, int]:
        """The begin and the end of a chunk."""
        return number * self.chunk_bytes, min((number + 1) * self.chunk_bytes, self.size_bytes)

    def is_direct(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if the packet is sent from, and received into, the memory of its only value."""
        return len(self.members) == 1 and tensors[0].is_contiguous() and device_of(tensors[0]) is None

    def memory(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The host memory that these values are sent from, or received into."""
        return bytes_of(tensors[0]) if self.is_direct(tensors) else memory_for(tensors, self.size_bytes)

    def packed(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[Callable[[], None], ...]]:
        """The bytes to send for these values, and waits after which they are there."""
        memory = self.memory(tensors)
        if self.is_direct(tensors):
            return memory, ()
        return memory, to_host(zip(tensors, self._places(memory), strict=True))

    def unpack(self, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy received bytes into the values, unless they were received there."""
        if not self.is_direct(tensors):
            for tensor, place in zip(tensors, self._places(memory), strict=True):
                from_host(place, tensor)

    def _places(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            yield memory[offset : offset + size]


def chunk_bytes_for(bytes_per_s: float) -> int:
    """The chunk size for a link of this rate, measured while others share it.

    A switch drops bytes that do not fit its buffer, and urgent values wait for the chunks in flight.

    Example:
        >>> chunk_bytes_for(1e9), chunk_bytes_for(2.5e7), chunk_bytes_for(1e5)
        (131072, 49152, 16384)
    """
    fitting = int(bytes_per_s * CHUNK_US / 1e6) // 4096 * 4096
    return min(max(fitting, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def pack(values: Iterable[tuple[str, int]], chunk_bytes: int = MAX_CHUNK_BYTES) -> tuple[Packet, ...]:
    """Packets of values, which are given by name and bytes in the order of a wire."""
    found: list[Packet] = []
    for name, size in values:
        last = found[-1] if found else None
        fits = last is not None and max(*last.sizes, size) <= SMALL_BYTES and last.size_bytes + size <= MAX_PACK_BYTES
        if last is not None and fits:
            found[-1] = Packet((*last.members, name), (*last.sizes, size), chunk_bytes)
        else:
            found.append(Packet((name,), (size,), chunk_bytes))
    return tuple(found)


@dataclass
class PacketTransfer:
    """One packet of one epoch that is being sent or received, with its values."""

    epoch: int
    values: dict[str, tuple[torch.Tensor, Done]] = field(default_factory=dict)
    memory: torch.Tensor | None = None
    waits: tuple[Callable[[], None], ...] = ()
    works: list[Any] = field(default_factory=list)
    next_chunk: int = 0


class Direction:
    """One direction of a wire: its packets, numbered alike at both ends, and those under way. Guarded by its lock."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.number: dict[str, int] = {}  # number of the packet that has a value
        self.first_tag: list[int] = []
        self.transfers: dict[tuple[int, int], PacketTransfer] = {}  # by number and epoch, until they have arrived
        self._next_tag = 1

    def add(self, packets: Sequence[Packet]) -> list[int]:
        """Add packets, and return their numbers. Known values and too many chunks are an `InputError`."""
        numbers = []
        for packet in packets:
            numbers.append(len(self.packets))
            for member in packet.members:
                if member in self.number:
                    raise InputError(f"wire: {member!r} is to be carried twice")
                self.number[member] = numbers[-1]
            self.packets.append(packet)
            self.first_tag.append(self._next_tag)
            self._next_tag += packet.num_chunks
            if self._next_tag > MAX_TAG:
                raise InputError(f"wire: {packet.members[0]!r} of {packet.size_bytes} bytes is too much to be carried")
        return numbers

    def tensors(self, number: int, transfer: PacketTransfer) -> list[torch.Tensor]:
        """The values of a transfer in the order of its packet."""
        return [transfer.values[member][0] for member in self.packets[number].members]


@dataclass
class ChunkInFlight:
    """A chunk that has left and has not been acknowledged.

    The sending thread and the thread that reads acknowledgments both learn of it, and the second of them waits for the
    work of the process group.
    """

    number: int
    transfer: PacketTransfer
    work: Any = None
    is_acknowledged: bool = False

    def sent(self, work: Any) -> Any:
        """Note that the group has sent it, and return the work that the sending thread waits for, if any."""
        if self.is_acknowledged:
            return work
        self.work = work
        return None

    def acknowledged(self) -> Any:
        """Note that the peer has it, and return the work that the calling thread waits for, if any."""
        self.is_acknowledged = True
        work, self.work = self.work, None
        return work


class SendQueue:
    """Choose the packet that sends the next chunk. Guarded by the lock of its wire.

    Ordered packets leave one after another, and the order repeats after the last one. A packet that is not in the order
    goes first once it is ready: few chunks are in flight, so that it does not wait long.
    """

    def __init__(self) -> None:
        # packets by number that were requested, and whose values are all there
        self.ready: dict[int, PacketTransfer] = {}
        self.in_flight: deque[ChunkInFlight] = deque()  # chunks that have left and not arrived
        self._order: list[int] = []
        self._ordered: set[int] = set()
        self._next = 0

    def add(self, numbers: Iterable[int]) -> None:
        """Add packets at the end of the order."""
        self._order += numbers
        self._ordered.update(self._order)

    def next(self) -> int | None:
        """The number of the packet whose next chunk may leave, or None."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return None
        free = next((number for number in self.ready if number not in self._ordered), None)
        if free is not None or not self._order:
            return free
        number = self._order[self._next]
        return number if number in self.ready else None

    def has_left(self, number: int) -> None:
        """Note that all chunks of a packet have left."""
        del self.ready[number]
        if number in self._ordered:
            self._next = (self._next + 1) % len(self._order)
