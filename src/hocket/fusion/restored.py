"""Tensors and random numbers as they were, for calls that fail or are made in another way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Snapshot", "restored"]


class Snapshot:
    """The contents of tensors and the states of random generators now."""

    def __init__(self, tensors: Sequence[Tensor], generators: dict[torch.device, tuple[torch.Generator, ...]]) -> None:
        self._contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._generators = generators
        self._before = dict(generators)
        self._states = [(each, each.get_state()) for group in generators.values() for each in group]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Restore them; generators that were made meanwhile are gone."""
        with torch.no_grad():
            for tensor, content in self._contents:
                tensor.copy_(content)
        self._generators.clear()
        self._generators.update(self._before)
        for generator, state in self._states:
            generator.set_state(state)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def restored(tensors: Sequence[Tensor], generators: dict[torch.device, tuple[torch.Generator, ...]]) -> Iterator[None]:
    """After an error, tensors and random numbers are what they were before; see `Snapshot`."""
    snapshot = Snapshot(tensors, generators)
    try:
        yield
    except BaseException:
        snapshot.put_back()
        raise
