"""Batches of an epoch, in an order that depends on the seed and the epoch and on nothing else.

A loader shuffles, and a data set may augment, by the global generators. They are seeded for each epoch and put back
around each batch, so that the draws of a model (dropout) and those of its data do not move each other: a trial gets the
same batches whatever it trains beside, and all trials of an epoch may share them.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from hocket.errors import InputError
from hocket.fusion.stacked import is_same

PRIMES = (1_000_003, 7_919)  # of a seed for each epoch; neighbouring seeds do not meet


MAX_SEEDED = 8  # trials are all seeded alike, and seeds of epochs come once
SEEDED: dict[tuple[Any, ...], Any] = {}  # states are never written into, so one may serve again


class RandomState:
    """The states of the global generators: Python's, numpy's where it is loaded, and torch's."""

    def __init__(self, seed: int | None = None) -> None:
        known = (seed, "numpy" in sys.modules, torch.cuda.is_initialized())
        if known in SEEDED:
            vars(self).update(vars(SEEDED[known]))
            return
        outside = None
        if seed is not None:
            outside = RandomState()
            random.seed(seed)
            torch.manual_seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)
        self._read()
        if outside is not None:
            outside._write()
            if len(SEEDED) >= MAX_SEEDED:
                SEEDED.clear()
            SEEDED[known] = copy.copy(self)

    def _read(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy = numpy.random.get_state() if numpy else None
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def _write(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the generators go on from this state, and note where they end. Outside they stay as they were."""
        outside = RandomState()
        self._write()
        try:
            yield
        finally:
            self._read()
            outside._write()

    def on(self, device: torch.device) -> torch.Tensor:
        """The state of a device's generator."""
        if device.type == "cpu":
            return self._torch
        assert self._cuda is not None
        return self._cuda[device.index or 0]

    def set_on(self, device: torch.device, state: torch.Tensor) -> None:
        """Let a device's generator go on from this state."""
        if device.type == "cpu":
            self._torch = state
        elif self._cuda is not None:
            self._cuda[device.index or 0] = state

    def tensors(self) -> dict[str, Any]:
        """The states that a trial's draws go on from, as plain tensors and numbers."""
        numpy = None if self._numpy is None else (self._numpy[0], list(map(int, self._numpy[1])), *self._numpy[2:])
        return {"torch": self._torch, "cuda": self._cuda, "python": self._python, "numpy": numpy}

    def load(self, tensors: dict[str, Any]) -> None:
        """Take over what `tensors` gave, or an older version of it, without Python's and numpy's."""
        self._torch, self._cuda = tensors["torch"], tensors["cuda"]
        self._python, self._numpy = tensors.get("python", self._python), tensors.get("numpy") or self._numpy

    def is_at(self, other: RandomState) -> bool:
        """True if all generators that both know stand alike."""
        mine, its = self.tensors(), other.tensors()
        of_cpu = all(None in (mine[key], its[key]) or mine[key] == its[key] for key in ("python", "numpy"))
        return of_cpu and is_same((self._torch, self._cuda), (other._torch, other._cuda))


def is_fixed(batches: Iterable[Any]) -> bool:
    """True if every epoch has the same batches in the same order: a list or a tuple of them."""
    return type(batches) in (list, tuple)


def epoch_batches(batches: Iterable[Any], seed: int, epoch: int, field: str = "batches") -> Iterator[tuple[Any, Any]]:
    """The pairs of inputs and target of one epoch, which `field` of a training gives."""
    empty = True
    for batch in batches if is_fixed(batches) else _drawn(batches, PRIMES[0] * seed + PRIMES[1] * epoch):
        empty = False
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            got = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise InputError(f"Training.{field}: expected batches (inputs, target), got {got}")
        yield batch[0], batch[1]
    if empty:
        raise InputError(f"Training.{field}: there is no batch to read in epoch {epoch}; can they be iterated again?")


def _drawn(batches: Any, seed: int) -> Iterator[Any]:
    state = RandomState(seed)
    if getattr(batches, "persistent_workers", False):  # they would go on with the draws of the epoch before
        batches._iterator = None
    for part in (batches, *_samplers(batches)):
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(seed)
    with state.active():
        iterator = iter(batches)
    while True:
        with state.active():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def updates(batches: Iterable[tuple[Any, Any]], accumulate: int) -> Iterator[tuple[Any, Any, bool, bool]]:
    """Batches, each with whether gradients begin anew before it, and whether the optimizer steps after it.

    Example:
        >>> [marks for _, _, *marks in updates([(1, 1), (2, 2), (3, 3)], accumulate=2)]
        [[True, False], [False, True], [True, True]]
    """
    ahead = iter(batches)
    batch = next(ahead, None)
    place = 0
    while batch is not None:
        following = next(ahead, None) if accumulate > 1 else None
        is_last = accumulate > 1 and following is None
        yield *batch, place % accumulate == 0, is_last or (place + 1) % accumulate == 0
        batch = following if accumulate > 1 else next(ahead, None)
        place += 1


def joined(parts: list[Any], dim: int = 0) -> Any:
    """Trees of the same form, such as outputs of batches, as one: tensors along an axis, numbers beside each other."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        return torch.cat(leaves, dim) if leaves[0].ndim > dim else torch.stack(leaves, dim)

    return pytree.tree_map(join, *parts)


def size_of(target: Any, inputs: Any) -> int:
    """The number of examples in a batch: the first axis of its target, else of its inputs, else 1."""
    for tree in (target, inputs):
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                return leaf.shape[0]
    return 1


def are_same_batches(first: Any, second: Any) -> bool:
    """True if two trials' batches are provably the same data in the same order, epoch for epoch."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if is_fixed(first):
        return is_same(first, second)
    if isinstance(first, DataLoader):
        settings = ("batch_size", "drop_last", "num_workers", "collate_fn")
        samplers = [type(loader.sampler) for loader in (first, second)]
        known = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        same = all(getattr(first, name) == getattr(second, name) for name in settings)
        same = same and samplers[0] is samplers[1] and samplers[0] in known
        same = same and all(type(loader.batch_sampler) is torch.utils.data.BatchSampler for loader in (first, second))
        mine, its = first.dataset, second.dataset
        same_data = mine is its or (type(mine) is type(its) is TensorDataset and is_same(mine.tensors, its.tensors))
        return same and _plain_sampler(first, second) and same_data
    return False


def _samplers(loader: Any) -> tuple[Any, Any]:
    """The sampler of a loader, and that of its batches: one of them says in which order it reads."""
    return getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def _plain_sampler(first: Any, second: Any) -> bool:
    own = []
    for loader in (first, second):
        options = [getattr(loader.sampler, name, None) for name in ("replacement", "_num_samples")]
        own.append([*options, *(getattr(each, "generator", None) is None for each in (loader, loader.sampler))])
    return bool(own[0] == own[1])
