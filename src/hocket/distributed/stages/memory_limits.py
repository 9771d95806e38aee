"""Peak memory of each rank of a partitioned step, and waits that keep it within limits.

The memory of a rank depends on the lifetime of values, and on copies of exchanged values, which stay until they are
delivered and read. So a partition is judged by the peak of each rank's part over all runs that its plan allows
(`peak_bytes`). Ops do not wait for deliveries, and received values have memory from the beginning of the step. If that
is too much, ops wait, and receives begin later, until enough memory is free (`held_back`). If no waits are enough,
other partitions are searched (`hocket.planning.partition.within_memory`).

Memory outside of the step (code, the Python objects of the whole graph) is not counted.
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

# Default limit, as a multiple of an equal share of the memory of one process. It is dropped if it cannot be kept.
DEFAULT_SHARE = 1.3


def limits_of(given: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...] | None:
    """The memory limit of each rank in bytes, or None if there is none.

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
    """The peak memory of each rank in bytes, over all runs that the joined plan allows."""
    return tuple(
        peak_bytes(part.graph, arrivals_apart(plan_of_rank(plan, rank)), _kept_order(part, order))
        for rank, part in enumerate(parts)
    )


def held_within(
    parts: Sequence[Captured], plan: Plan, order: Sequence[str], limits: Sequence[float]
) -> tuple[Plan, tuple[float, ...]]:
    """Add waits to the joined plan that keep ranks within their limits, and return it with the peaks of all ranks.

    If no waits keep a rank within its limit, it gets those with the smallest peak that this order allows.

    Args:
        parts: parts of all ranks.
        plan: plan of all ranks.
        order: all ops, transfers too (`joined_order`).
        limits: limit of each rank in bytes.
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
    """Return if the memory of each op is within the largest limit.

    Raises:
        InputError: an op needs more. It is named, with its bytes.

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
    """Return if the peak of each rank is within its limit.

    Raises:
        InputError: a rank exceeds its limit. It is named, with both numbers of bytes.
    """
    rank = int(np.argmax(np.asarray(peaks) / np.asarray(limits)))
    if peaks[rank] > limits[rank]:
        raise InputError(
            f"distribute: rank {rank} would hold {peaks[rank]:,.0f} bytes at its peak, and may hold "
            f"{limits[rank]:,.0f}; no division that was looked at needs less"
        )


def _kept_order(part: Captured, order: Sequence[str]) -> list[str]:
    return [name for name in order if name in part.graph.by_name]
