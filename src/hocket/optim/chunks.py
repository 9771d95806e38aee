"""Parameters of an update laid out: in buckets of one step count, cut into chunks that fit a core's cache.

    parameters of a group that have gradients --bucket--> one device, dtype and step count
        --chunk--> small ones together, up to `CHUNK_BYTES`; a large one by itself, a few models at a time

torch's fused kernels round what is left over after the last whole vector otherwise than the vectors before it. A bucket
is even where that cannot show a model's place: each model's part fills whole cache lines, by which the kernels count.

What a step lays out the next one finds again: as long as parameters, states and counts are the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, is_
from typing import Any

import torch

from hocket.optim.arithmetic import Factor, Tensors, add
from hocket.optim.hyper import Number
from hocket.optim.slots import Slots

GRAD, GRAD_DTYPE = attrgetter("grad"), attrgetter("grad.dtype")
LINE_BYTES = 64
CHUNK_BYTES = 1 << 20  # parameters of one chunk on a CPU; an update reads and writes a few times as much
LARGE_CHUNKS = 2  # of these in a chunk of one large parameter: half the calls
# Elements of a bucket up to which one thread updates it, torch's own grain. Its fused kernels share out each parameter,
# however small, and to wake threads for that takes longer than the update.
GRAIN = 32_768


@dataclass(frozen=True)
class Chunk:
    """Parameters that are updated together: their values, their gradients (negated to maximize) and their state."""

    params: Tensors
    grads: Tensors
    states: Sequence[dict[str, Any]]
    count: torch.Tensor | None

    def state(self, key: str) -> Tensors:
        """This entry of each parameter's state."""
        found = [state[key] for state in self.states]
        return [torch.view_as_real(tensor) for tensor in found] if found[0].is_complex() else found

    def decayed(self, weight_decay: Factor) -> Chunk:
        """With `weight_decay` times the parameters added to the gradients."""
        if not isinstance(weight_decay, list) and weight_decay == 0:
            return self
        return replace(self, grads=add(self.grads, self.params, weight_decay))


@dataclass(frozen=True)
class Pieces:
    """Parameters that are updated together. A large one goes alone, with the models from `begin` to `end`."""

    params: Tensors
    states: Sequence[dict[str, Any]]
    begin: int = 0
    end: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These models' part of a tensor whose first dimension is B."""
        return tensor if self.end is None else tensor[self.begin : self.end]

    def chunk(self, maximize: bool) -> Chunk:
        """Their part of the parameters, the gradients and the states, in which all but the count is of all models."""
        params, states, count = self.params, self.states, self.states[0].get("step")
        grads: Tensors = list(map(GRAD, params))
        if self.end is not None:
            params, grads = list(map(self.of, params)), list(map(self.of, grads))
            states = [{key: self.of(value) for key, value in states[0].items() if key != "step"}]
        if params[0].is_complex():
            params, grads = list(map(torch.view_as_real, params)), list(map(torch.view_as_real, grads))
        return Chunk(params, list(torch._foreach_neg(grads)) if maximize else grads, states, count)


def columns(rows: Mapping[str, torch.Tensor], pieces: Pieces, slots: Slots) -> dict[str, Tensors]:
    """For each coefficient that is one per model a list, with a tensor beside each of the pieces' parameters."""
    shapes = [(slots[p], p.dim() + p.is_complex() - 1) for p in pieces.params]
    found = {}
    for name, row in rows.items():
        views = {
            (slot, dims): pieces.of(row).view(-1, *(1,) * dims) if slot is None else row[slot]
            for slot, dims in {*shapes}
        }
        found[name] = [views[shape] for shape in shapes]
    return found


@dataclass(frozen=True)
class Bucket:
    """Parameters of one device, dtype and step count, which is None where the optimizer has none."""

    is_even: bool
    whole: Pieces
    chunks: Sequence[Pieces]

    @property
    def params(self) -> Tensors:
        """All of them."""
        return self.whole.params

    @property
    def state(self) -> dict[str, Any]:
        """The state of one parameter, for all that they have in common."""
        return self.whole.states[0]

    @cached_property
    def is_small(self) -> bool:
        """True if one thread updates it fastest."""
        return sum(p.numel() for p in self.params) <= GRAIN

    def fits_kernels(self) -> bool:
        """True if torch's fused kernels take these parameters and round alike for each model."""
        params, first = self.params, self.params[0]
        count = self.state.get("step")
        return (
            self.is_even
            and first.device.type == "cpu"
            and first.dtype in (torch.float32, torch.float64)
            and (count is None or count.dim() == 0)
            and all(map(torch.Tensor.is_contiguous, [*params, *map(GRAD, params)]))
            and {*map(GRAD_DTYPE, params)} == {first.dtype}
        )

    def rows(self, numbers: Mapping[str, Number]) -> dict[str, torch.Tensor]:
        """The coefficients that are one per model, in the parameters' precision."""
        found = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}
        if found:
            like = self.params[0].real if self.params[0].is_complex() else self.params[0]
            # Half precision would round a rate to three digits; torch's scalars are float32 there.
            dtype = torch.float32 if like.itemsize < 4 else like.dtype
            # A `PerModel` goes into an op as it is: a capture knows the group's tensor, and not a plain alias of it.
            found = {name: value.to(like.device, dtype) for name, value in found.items()}
        return found

    @contextmanager
    def threads(self) -> Iterator[None]:
        """The number of threads that updates it fastest, for the ops of the block."""
        usual = torch.get_num_threads()
        if self.is_small:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(usual)


@dataclass(frozen=True)
class Layout:
    """Buckets of the parameters of a group that have gradients, valid for as long as `is_of` holds."""

    params: Tensors
    states: Sequence[dict[str, Any]]
    objects: Sequence[Any]
    values: Sequence[Any]
    buckets: Sequence[Bucket]

    def is_of(self, params: Tensors, states: Sequence[dict[str, Any]], entries: tuple[Any, ...]) -> bool:
        """True if these are still the same parameters, states and counts."""
        objects, values = _identity(params, states, entries)
        return values == self.values and all(map(is_, objects, self.objects))


def lay_out(params: Tensors, states: Sequence[dict[str, Any]], entries: tuple[Any, ...], slots: Slots) -> Layout:
    """Bucket and cut these parameters, whose states have these entries."""

    def is_even(p: torch.Tensor) -> bool:
        return slots.num_models == 1 or slots[p] is not None or p.nbytes // slots.num_models % LINE_BYTES == 0

    found: dict[Any, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
    for p, state in zip(params, states, strict=True):
        key = (is_even(p), p.device, p.dtype, id(state.get("step")), id(state.get("mu_product")))
        found.setdefault(key, []).append((p, state))
    buckets = []
    for (even, *_), rows in found.items():
        own, states_of = [p for p, _ in rows], [state for _, state in rows]
        buckets.append(Bucket(even, Pieces(own, states_of), list(_cut(own, states_of, slots))))
    return Layout(params, states, *_identity(params, states, entries), buckets)


def _identity(
    params: Tensors, states: Sequence[dict[str, Any]], entries: tuple[Any, ...]
) -> tuple[list[Any], tuple[Any, ...]]:
    """The objects, and the values, that are the same as long as a layout holds."""
    objects = [*params, *states, *[state.get("step") for state in states]]
    return objects, (entries, *map(torch.Tensor.numel, params))


def _cut(params: Tensors, states: Sequence[dict[str, Any]], slots: Slots) -> Iterator[Pieces]:
    """Parameters on a CPU in pieces of up to `CHUNK_BYTES`, a large one in pieces of up to `LARGE_CHUNKS` as much."""
    begin = size_bytes = 0
    for number, p in enumerate(params):
        size = p.nbytes if p.device.type == "cpu" else 0
        is_large = size > CHUNK_BYTES and slots[p] is None
        if begin < number and (is_large or size_bytes + size > CHUNK_BYTES):
            yield Pieces(params[begin:number], states[begin:number])
            begin, size_bytes = number, 0
        size_bytes += size
        if is_large:
            at_once = max(1, LARGE_CHUNKS * CHUNK_BYTES * p.shape[0] // size)
            for first in range(0, p.shape[0], at_once):
                yield Pieces([p], [states[number]], first, first + at_once)
            begin, size_bytes = number + 1, 0
    if begin < len(params):
        yield Pieces(params[begin:], states[begin:])
