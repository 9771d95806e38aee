"""Memory of a whole model at a rank that runs a part of its step: what the part does not use is given back.

A tensor without its memory is empty: whoever computes with it meets another shape, and no numbers of long ago.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from hocket.tracing.state import Entry

__all__ = ["PartMemory"]


class PartMemory:
    """Which of some places have their memory.

    Args:
        entries: the places, by name; one whose state is not made yet has none.

    Attributes:
        released: shapes and strides of those that have given it back.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.released: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def keep(self, names: Collection[str]) -> None:
        """Give back the memory of all others."""
        for name, entry in self._entries.items():
            if name in names or name in self.released:
                continue
            try:
                tensor = entry.get()
            except KeyError:
                continue
            if tensor.numel():
                self.released[name] = (tuple(tensor.shape), tensor.stride())
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def restore(self, names: Collection[str] | None = None) -> None:
        """Give these memory again, or all of them; what is in it is for the caller to say."""
        for name in list(self.released) if names is None else self.released.keys() & set(names):
            shape, strides = self.released.pop(name)
            tensor = self._entries[name].get()
            tensor.data = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    def size_bytes(self, name: str) -> int:
        """How large one of them is where it has its memory."""
        tensor = self._entries[name].get()
        shape = self.released[name][0] if name in self.released else tensor.shape
        return math.prod(shape) * int(tensor.element_size())
