"""What goes over a wire as one piece: a value, or small values side by side; and its chunks.

A message costs tens of microseconds however small it is, and a step has dozens of values of a few bytes (biases,
statistics of batch norm). So neighbours in the order of a wire that are small travel as one parcel. Large values are
cut in chunks: whatever becomes urgent waits for the chunks under way and for no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hocket.errors import InputError
from hocket.execution.channels import Done

__all__ = [
    "MAX_CHUNK_BYTES",
    "MIN_CHUNK_BYTES",
    "Moving",
    "Parcel",
    "WireLayout",
    "bytes_of",
    "chunk_bytes_for",
    "is_direct",
    "packed",
    "packed_bytes",
    "unpack",
]

# What a link carries in this time is a chunk, within these bounds: smaller ones cost more work than they are worth, and
# of larger ones a fast link takes no more in the same time.
CHUNK_US = 2000.0
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 16 * 1024, 128 * 1024
# Values up to the first are packed, into parcels up to the second.
SMALL_BYTES = 16 * 1024
MAX_PACK_BYTES = 64 * 1024
# Gloo counts chunks in a number of the C language.
MAX_TAG = 2**31 - 1
# Where values begin inside a parcel: any dtype can be read there.
ALIGNMENT = 16


@dataclass(frozen=True)
class Parcel:
    """Values that travel as one.

    Attributes:
        members: names of the values.
        sizes: bytes of each.
        chunk_bytes: the size of its chunks, but for the last one.

    Example:
        >>> Parcel(("a", "b"), (20, 8)).offsets, Parcel(("a", "b"), (20, 8)).size_bytes
        ((0, 32), 40)
        >>> parcel = Parcel(("w",), (200_000,))
        >>> [parcel.chunk(number) for number in range(parcel.num_chunks)]
        [(0, 131072), (131072, 200000)]
    """

    members: tuple[str, ...]
    sizes: tuple[int, ...]
    chunk_bytes: int = MAX_CHUNK_BYTES

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
        """One, an empty one, where there is nothing to carry. No list of them: the size may be what a peer says."""
        return max(1, -(-self.size_bytes // self.chunk_bytes))

    def chunk(self, number: int) -> tuple[int, int]:
        """Begin and end of a chunk."""
        return number * self.chunk_bytes, min((number + 1) * self.chunk_bytes, self.size_bytes)


def chunk_bytes_for(bytes_per_s: float) -> int:
    """The size of chunks for a link of this rate, as one of those that share it sees it.

    A switch drops what does not fit its buffer, and of many workers those wait that lose; and whatever is urgent waits
    for the chunks under way.

    Example:
        >>> chunk_bytes_for(1e9), chunk_bytes_for(2.5e7), chunk_bytes_for(1e5)
        (131072, 49152, 16384)
    """
    fitting = int(bytes_per_s * CHUNK_US / 1e6) // 4096 * 4096
    return min(max(fitting, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def packed(values: Iterable[tuple[str, int]], chunk_bytes: int = MAX_CHUNK_BYTES) -> tuple[Parcel, ...]:
    """Values with their sizes in bytes, in the order of a wire, as parcels in this order.

    Example:
        >>> [parcel.members for parcel in packed([("a", 8), ("b", 16), ("w", 1_000_000), ("c", 8)])]
        [('a', 'b'), ('w',), ('c',)]
    """
    found: list[Parcel] = []
    for name, size in values:
        last = found[-1] if found else None
        fits = last is not None and max(*last.sizes, size) <= SMALL_BYTES and last.size_bytes + size <= MAX_PACK_BYTES
        if last is not None and fits:
            found[-1] = Parcel((*last.members, name), (*last.sizes, size), chunk_bytes)
        else:
            found.append(Parcel((name,), (size,), chunk_bytes))
    return tuple(found)


@dataclass
class Moving:
    """A parcel that is being sent or received, with the values in it."""

    epoch: int
    values: dict[str, tuple[torch.Tensor, Done]] = field(default_factory=dict)
    memory: torch.Tensor | None = None
    works: list[Any] = field(default_factory=list)
    next_chunk: int = 0


class WireLayout:
    """The parcels of one direction of a wire, numbered alike at both ends."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.number: dict[str, int] = {}  # of the parcel that a value is in
        self.first_tag: list[int] = []
        self._next_tag = 1

    def add(self, parcels: Sequence[Parcel]) -> list[int]:
        """More parcels; their numbers.

        Raises:
            InputError: a value that is there already, or more chunks than can be told apart.
        """
        numbers = []
        for parcel in parcels:
            numbers.append(len(self.parcels))
            for member in parcel.members:
                if member in self.number:
                    raise InputError(f"wire: {member!r} is to be carried twice")
                self.number[member] = numbers[-1]
            self.parcels.append(parcel)
            self.first_tag.append(self._next_tag)
            self._next_tag += parcel.num_chunks
            if self._next_tag > MAX_TAG:
                raise InputError(f"wire: {parcel.members[0]!r} of {parcel.size_bytes} bytes is too much to be carried")
        return numbers


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_direct(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a parcel is sent from, and received into, the memory of its value."""
    return len(parcel.members) == 1 and tensors[0].is_contiguous()


def packed_bytes(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What goes over the wire for a parcel of these values."""
    if is_direct(parcel, tensors):
        return bytes_of(tensors[0])
    memory = torch.empty(parcel.size_bytes, dtype=torch.uint8)
    for tensor, place in zip(tensors, _places(parcel, memory), strict=True):
        place.copy_(bytes_of(tensor.detach().contiguous()))
    return memory


def unpack(parcel: Parcel, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what came over the wire to where the values belong, unless it came there directly."""
    if not is_direct(parcel, tensors):
        for tensor, place in zip(tensors, _places(parcel, memory), strict=True):
            tensor.detach().copy_(place.view(tensor.dtype).view(tensor.shape))


def _places(parcel: Parcel, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    for offset, size in zip(parcel.offsets, parcel.sizes, strict=True):
        yield memory[offset : offset + size]
