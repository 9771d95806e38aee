"""How much memory each rank of a partitioned step holds at the most, and partitions that keep it within limits.

The partitioner adds up what ops keep on their device. What a rank holds beyond that depends on the partition: values
that live for a moment, and copies of what it sends and receives, which stay until the step ends. So a partition is
judged by the peak of each rank's own part, bounded over all runs that its plan allows (`peak_bytes`), and where that is
too much, searched for again with as much less for the partitioner to give away::

    limit 100   search within 100 --> kept 98, peak 109 --> search within 89 --> kept 88, peak 97

Memory that is not the step's (code, the Python objects of the whole graph) is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.distributed.stages.joined import plan_of_rank
from hocket.errors import InputError
from hocket.ir import Graph, Plan
from hocket.planning.critical_path import peak_bytes
from hocket.planning.partition import Partition, PartitionProblem, partitioned
from hocket.tracing.captured import Captured

__all__ = ["DEFAULT_SHARE", "check_peaks", "limits_of", "partitioned_within", "peaks_of"]

# Of an equal share of what one process holds: what a rank may hold where nobody sets a limit and it can be kept.
DEFAULT_SHARE = 1.3
# How often a partition is searched for again with less memory to give away.
ROUNDS = 4


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


def peaks_of(parts: Sequence[Captured], plan: Plan) -> tuple[float, ...]:
    """The most bytes that each rank holds in any run that the joined plan allows.

    Args:
        parts: what each rank runs.
        plan: of all ranks.
    """
    return tuple(peak_bytes(_held(part.graph), plan_of_rank(plan, rank)) for rank, part in enumerate(parts))


def partitioned_within(
    problem: PartitionProblem,
    search: Mapping[str, Any],
    limits: Sequence[float] | None,
    fair_bytes: float,
    peaks: Callable[[Partition], Sequence[float]],
) -> Partition:
    """A partition of which no rank's peak is above its limit.

    Args:
        problem: ops and ranks.
        search: arguments of the partitioner.
        limits: of each rank; None: `fair_bytes` for all, where such a partition is found, or else the nearest.
        fair_bytes: what a rank should hold where no limit was set.
        peaks: what each rank holds by a partition.

    Raises:
        InputError: no partition within the limits was found (or an op fits nowhere: named, with its bytes).
    """
    wanted = np.full(problem.num_parts, fair_bytes) if limits is None else np.asarray(limits, np.float64)
    found = partitioned(problem if limits is None else replace(problem, memory_limit_bytes=wanted), **search)
    best, best_peaks = found, np.asarray(peaks(found))
    nearest = best_peaks
    for _ in range(ROUNDS):
        if np.all(best_peaks <= wanted):
            return best
        kept = np.bincount(found.part, problem.memory_bytes, problem.num_parts)
        room = np.maximum(wanted - np.maximum(nearest - kept, 0.0), 0.0)
        try:
            found = partitioned(replace(problem, memory_limit_bytes=room), **search)
        except InputError:
            break  # not with so little: what was nearest is reported
        nearest = np.asarray(peaks(found))
        if (nearest / wanted).max() < (best_peaks / wanted).max():
            best, best_peaks = found, nearest
    if limits is not None:
        check_peaks(best_peaks.tolist(), limits)
    return best


def check_peaks(peaks: Sequence[float], limits: Sequence[float]) -> None:
    """Return if no rank holds more than its limit.

    Raises:
        InputError: one does; names it, with both numbers of bytes.
    """
    rank = int(np.argmax(np.asarray(peaks) / np.asarray(limits)))
    if peaks[rank] > limits[rank]:
        raise InputError(
            f"distribute: rank {rank} would hold {peaks[rank]:,.0f} bytes at its peak, and may hold "
            f"{limits[rank]:,.0f}; no division of the step that was looked at needs less"
        )


def _held(graph: Graph) -> Graph:
    """With what is sent and received there until the step ends, as executors keep it."""
    moved = {name for op in graph.ops if op.role in ("recv", "send") for name in (*op.reads, *op.writes)}
    buffers = tuple(b._replace(life="kept") if b.name in moved and b.life == "step" else b for b in graph.buffers)
    return replace(graph, buffers=buffers)
