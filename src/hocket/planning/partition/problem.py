"""The partition problem: ops with a duration on each device, tensors, memory, and groups that stay together.

A *tensor* has one source and several readers. It is moved once to each part that reads it and does not contain the
source, whatever the number of readers there. An order without data moves nothing and still counts for `acyclic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError

# Sets of parts are the bits of one word in the search.
MAX_PARTS = 64

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]


class Tensor(NamedTuple):
    """The output of one op that others read."""

    source: int  # position of the op that writes it
    readers: tuple[int, ...]  # positions of the ops that read it
    size_bytes: float  # bytes moved to each part that has a reader and not the source
    transfer_us: float = 0.0  # time of one move, for the objectives that count time


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Ops to be placed on devices.

    Raises `InputError` at construction for lengths that differ, a negative or infinite time, a device without speed, a
    tensor that its source reads, or an op that fits into no device (named, with its bytes).
    """

    names: tuple[str, ...]  # of the ops
    duration_us: Floats  # a row for each op, a column for each device
    tensors: tuple[Tensor, ...] = ()  # data between ops
    # pairs of positions of which the second op waits for the first, with data or without
    waits: Sequence[tuple[int, int]] = ()
    devices: tuple[str, ...] = ()  # as many as parts, by default ``part0``, ``part1`` and so on
    # memory that each op keeps on its device, 0 by default
    memory_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    memory_limit_bytes: Floats = field(default_factory=lambda: np.zeros(0))  # of each device, unlimited by default
    # a number for each op. Ops of one number are placed together, and by default each has another one.
    group: Integers = field(default_factory=lambda: np.zeros(0, np.int32))
    # True for ops of the backward pass. If groups hold ops of both passes, the parts of a pipeline depend on each other
    # both ways, and `acyclic` holds for each pass alone.
    backward: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    # the share of a tensor's time that each device pays at its border, 1 by default
    transfer_price: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        ops = len(self.names)
        table = np.ascontiguousarray(self.duration_us, np.float64)
        if table.ndim != 2 or table.shape[0] != ops or table.shape[1] < 1:
            raise InputError(f"partition: expected durations for {ops} ops on each device, got shape {table.shape}")
        parts = table.shape[1]
        set_ = object.__setattr__
        set_(self, "duration_us", table)
        set_(self, "tensors", tuple(self.tensors))
        set_(self, "devices", tuple(self.devices) or tuple(f"part{part}" for part in range(parts)))
        defaults = (
            ("memory_bytes", ops, 0.0, np.float64),
            ("memory_limit_bytes", parts, np.inf, np.float64),
            ("backward", ops, False, np.bool_),
            ("transfer_price", parts, 1.0, np.float64),
        )
        for name, length, default, kind in defaults:
            given = np.asarray(getattr(self, name), kind)
            found = np.full(length, default, kind) if given.size == 0 else given
            if found.shape != (length,):
                raise InputError(f"partition: expected {length} values of {name}, got {found.size}")
            set_(self, name, found)
        group = np.asarray(self.group) if np.size(self.group) else np.arange(ops)
        if group.shape != (ops,) or len(self.devices) != parts:
            raise InputError(f"partition: expected a group for each of {ops} ops and {parts} device names")
        set_(self, "group", np.unique(group, return_inverse=True)[1].astype(np.int32))
        _check(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_parts(self) -> int:
        return int(self.duration_us.shape[1])

    @property
    def num_groups(self) -> int:
        return int(self.group.max()) + 1 if len(self) else 0

    @cached_property
    def work_us(self) -> Floats:
        """The work of each op, which is balanced: its mean duration over the devices."""
        return self.duration_us.mean(axis=1)

    @cached_property
    def shares(self) -> Floats:
        """The target share of the work of each device, in proportion to its speed on all ops."""
        takes_us = self.duration_us.sum(axis=0)
        if not np.all(takes_us > 0):
            return np.full(self.num_parts, 1.0 / self.num_parts)
        return (1.0 / takes_us) / (1.0 / takes_us).sum()

    @cached_property
    def delays_us(self) -> dict[tuple[int, int], float]:
        """Extra delay of each dependency when its ops are on different devices."""
        found = {(int(src), int(dst)): 0.0 for src, dst in self.waits}
        for tensor in self.tensors:
            for reader in tensor.readers:
                if (tensor.source, reader) in found:
                    found[tensor.source, reader] = max(found[tensor.source, reader], tensor.transfer_us)
        return found

    @cached_property
    def two_passes(self) -> bool:
        """Return True if some group holds ops of both passes, so that only waits within a pass count."""
        both = np.zeros((self.num_groups, 2), np.bool_)
        both[self.group, self.backward.astype(int)] = True
        return bool(both.all(axis=1).any())

    @cached_property
    def waits_by_pass(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Pairs of groups of which the second waits for the first: in the forward pass and in the backward pass.

        All are in the first list unless groups hold ops of both passes. Then waits between the passes are left out.
        """
        found: tuple[dict[tuple[int, int], None], dict[tuple[int, int], None]] = ({}, {})
        group, backward, mixed = self.group.tolist(), self.backward.tolist(), self.two_passes
        for src, dst in self.waits:
            if group[src] != group[dst] and not (mixed and backward[src] != backward[dst]):
                found[mixed and backward[src]][group[src], group[dst]] = None
        return list(found[0]), list(found[1])

    def by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of values or rows over the ops of each group."""
        found = np.zeros((self.num_groups, *values.shape[1:]))
        np.add.at(found, self.group, values)
        return found


def _check(problem: PartitionProblem) -> None:
    ops, parts = len(problem), problem.num_parts
    if parts > MAX_PARTS:
        raise InputError(f"partition: expected at most {MAX_PARTS} devices, got {parts}")
    wrong = np.argwhere(~(np.isfinite(problem.duration_us) & (problem.duration_us >= 0)))
    if len(wrong):
        op, part = wrong[0]
        raise InputError(
            f"partition: op {problem.names[op]!r} takes {problem.duration_us[op, part]} us on device "
            f"{problem.devices[part]!r}: expected a finite number >= 0 (is its speed 0?)"
        )
    for tensor in problem.tensors:
        if not all(0 <= op < ops for op in (tensor.source, *tensor.readers)):
            raise InputError(f"partition: a tensor names an op that is not there: {tensor}")
        if tensor.source in tensor.readers:
            raise InputError(f"partition: op {problem.names[tensor.source]!r} reads a tensor that it makes itself")
        if not (0 <= tensor.size_bytes < np.inf and 0 <= tensor.transfer_us < np.inf):
            raise InputError(f"partition: a tensor of {problem.names[tensor.source]!r} has no size: {tensor}")
    for src, dst in problem.waits:
        if src == dst:
            raise InputError(f"partition: op {problem.names[src]!r} waits for itself")
    _check_memory(problem)


def _check_memory(problem: PartitionProblem) -> None:
    most = problem.memory_limit_bytes.max()
    needed = problem.by_group(problem.memory_bytes)
    for group in np.flatnonzero(needed > most)[:1]:
        members = np.flatnonzero(problem.group == group)
        op = members[np.argmax(problem.memory_bytes[members])]
        others = f" with the {len(members) - 1} ops that stay with it" if len(members) > 1 else ""
        raise InputError(
            f"partition: op {problem.names[op]!r}{others} needs {needed[group]:,.0f} bytes, "
            f"and no device has more than {most:,.0f}"
        )
    if problem.memory_bytes.sum() > problem.memory_limit_bytes.sum():
        raise InputError(
            f"partition: all ops need {problem.memory_bytes.sum():,.0f} bytes, "
            f"and the devices have {problem.memory_limit_bytes.sum():,.0f} together"
        )
