"""How much memory each rank of a partitioned step holds at the most, and partitions that keep it within limits.

What a rank holds depends on when values are there, and on copies of what it sends and receives, which stay until they
are delivered and read. So a partition is judged by the peak of each rank's own part, bounded over all runs that its
plan allows (`peak_bytes`). Nothing in a step waits for a delivery, and what is received has its memory from the step's
beginning on; where that is too much, ops wait, and receives begin later, for as much as has to be freed for them
(`held_back`). Where no waits are enough, other partitions are looked for (`hocket.planning.partition.within_memory`).

Memory that is not the step's (code, the Python objects of the whole graph) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.distributed.stages.joined import plan_of_rank
from hocket.errors import InputError
from hocket.execution.base import arrivals_apart
from hocket.ir import Graph, Plan
from hocket.planning.critical_path import held_back, peak_bytes, serial_peak_bytes
from hocket.tracing.captured import Captured

__all__ = ["DEFAULT_SHARE", "check_fits", "check_peaks", "held_within", "limits_of", "peaks_of"]

# Of an equal share of what one process holds: what a rank may hold where nobody sets a limit and it can be kept.
DEFAULT_SHARE = 1.3


def limits_of(given: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...] | None:
    """A limit for each rank, in bytes; None: none was set.

    Raises:
        InputError: a limit that is not above 0, or not one for each rank.

    Example:
        >>> limits_of(1e9, 2), limits_of(None, 2)
        ((1000000000.0, 1000000000.0), None)
    """
    if given is None:
        return None
    limits = tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),) * num_ranks
    if len(limits) != num_ranks or not all(limit > 0 for limit in limits):
        raise InputError(
            f"distribute: expected memory_bytes to be a number above 0, or one for each of {num_ranks} ranks, "
            f"got {given}"
        )
    return limits


def peaks_of(parts: Sequence[Captured], plan: Plan, order: Sequence[str]) -> tuple[float, ...]:
    """The most bytes that each rank holds in any run that the joined plan allows.

    Args:
        parts: what each rank runs.
        plan: of all ranks.
        order: of all ops, transfers too (`joined_order`).
    """
    return tuple(
        peak_bytes(part.graph, arrivals_apart(plan_of_rank(plan, rank)), _kept_order(part, order))
        for rank, part in enumerate(parts)
    )


def held_within(
    parts: Sequence[Captured], plan: Plan, order: Sequence[str], limits: Sequence[float]
) -> tuple[Plan, tuple[float, ...]]:
    """The joined plan with the waits that keep ranks within their limits, and what each then holds at the most.

    A rank that no waits keep so gets those with which it holds the least that this order allows.

    Args:
        parts: what each rank runs.
        plan: of all ranks.
        order: of all ops, transfers too (`joined_order`).
        limits: of each rank, in bytes.
    """
    peaks = []
    after = dict(plan.after)
    for rank, (part, limit) in enumerate(zip(parts, limits, strict=True)):
        kept, apart = _kept_order(part, order), arrivals_apart(plan_of_rank(plan, rank))
        peak = peak_bytes(part.graph, apart, kept)
        if peak > limit:
            least = serial_peak_bytes(part.graph, kept)
            found = held_back(part.graph, apart, kept, max(limit, least))
            assert found is not None  # the order itself keeps that
            held, peak = found
            after |= held.after
        peaks.append(peak)
    return replace(plan, after=after), tuple(peaks)


def check_fits(graph: Graph, limits: Sequence[float]) -> None:
    """Return if each op could run somewhere, with the memory that it touches.

    Raises:
        InputError: an op that could not; names it, with its bytes.

    Example:
        >>> from hocket.ir import Buffer, Op
        >>> check_fits(Graph((Op("mm", writes=("y",)),), buffers=(Buffer("y", 64.0),)), (32.0, 48.0))
        Traceback (most recent call last):
        ...
        hocket.errors.InputError: distribute: op 'mm' needs 64 bytes to run, and no rank may hold more than 48
    """
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers}
    for op in graph.ops:
        needed = sum(size.get(name, 0.0) for name in {*op.reads, *op.writes})
        if needed > max(limits):
            raise InputError(
                f"distribute: op {op.name!r} needs {needed:,.0f} bytes to run, and no rank may hold more than "
                f"{max(limits):,.0f}"
            )


def check_peaks(peaks: Sequence[float], limits: Sequence[float]) -> None:
    """Return if no rank holds more than its limit.

    Raises:
        InputError: one does; names it, with both numbers of bytes.
    """
    rank = int(np.argmax(np.asarray(peaks) / np.asarray(limits)))
    if peaks[rank] > limits[rank]:
        raise InputError(
            f"distribute: rank {rank} would hold {peaks[rank]:,.0f} bytes at its peak, and may hold "
            f"{limits[rank]:,.0f}; no division that was looked at needs less"
        )


def _kept_order(part: Captured, order: Sequence[str]) -> list[str]:
    return [name for name in order if name in part.graph.by_name]
