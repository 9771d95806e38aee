"""Partitions whose parts keep their peak memory within limits.

The search limits the sum of what ops keep on their device. The peak differs: it is the sum at one moment, and includes
copies of exchanged tensors. So the result is judged by its peaks. If those are too high, moves of ops lower them
(`lowered`). Both are then tried from other partitions: with less memory for each part in the search, and with the
fewest bytes moved, which means the fewest copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.planning.partition.part_peaks import PartPeaks, lowered
from hocket.planning.partition.partitioned import Partition, partitioned
from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.search import Wanted, keeps_limits

# Memory of a part in the search: this factor times the total of all ops, in proportion to the limits.
ROOMS = (1.2, 1.04)
# The default `epsilon` for partitions with few bytes moved.
EPSILON = 0.5


def partitioned_within(
    problem: PartitionProblem,
    search: Mapping[str, Any],
    limits: Sequence[float],
    held: PartPeaks,
    peaks: Callable[[Partition], Sequence[float]] | None = None,
    *,
    is_promise: bool,
) -> Partition:
    """A partition whose parts keep their peaks within the limits, or the nearest one if none was found.

    Args:
        problem: ops and devices.
        search: arguments of `partitioned`.
        limits: of each part, in bytes.
        held: the peaks of the problem's graph.
        peaks: peaks of a partition's parts that are more exact than those of `held`.
        is_promise: limits have to be kept. Otherwise, if no partition keeps them, the result of the search without
            limits is returned, which has the best objective.

    Raises:
        InputError: as `partitioned`.
    """
    wanted = np.asarray(limits, np.float64)
    free = replace(problem, memory_limit_bytes=np.full(problem.num_parts, np.inf))
    first = partitioned(free, **search)

    def distance(found: Partition) -> float:
        return float((np.asarray(held.of(found.part) if peaks is None else peaks(found)) / wanted).max())

    tried = [(distance(first), first)]
    for found in (first, *_others(free, search, wanted)) if tried[0][0] > 1.0 else ():
        # Moves worsen balance and bytes moved, so they are made only for a promise.
        for each in (found, _moved(found, search, wanted, held)) if is_promise else (found,):
            tried.append((distance(each), each))
            if tried[-1][0] <= 1.0:
                return each
    return min(tried, key=lambda pair: pair[0])[1] if is_promise else first


def _others(problem: PartitionProblem, search: Mapping[str, Any], wanted: NDArray[np.float64]) -> Iterator[Partition]:
    short = {**search, "budget_s": search["budget_s"] / 4}
    cut = {**short, "objective": "cut", "epsilon": EPSILON if search["epsilon"] is None else search["epsilon"]}
    for again in (short, cut) if search["objective"] != "pipeline" else (short,):
        for room in ROOMS:
            kept = room * problem.memory_bytes.sum() * wanted / wanted.sum()
            try:
                yield partitioned(replace(problem, memory_limit_bytes=kept), **again)
            except InputError:
                continue  # no partition fits


def _moved(found: Partition, search: Mapping[str, Any], wanted: NDArray[np.float64], held: PartPeaks) -> Partition:
    """The partition after moves that lower its peaks and keep the limits of the search."""
    problem, objective = replace(found.problem, memory_limit_bytes=np.full(len(wanted), np.inf)), search["objective"]
    keeps = Wanted(
        objective,
        0.03 if search["epsilon"] is None and objective == "cut" else search["epsilon"],
        search.get("two_sided", True),
        search.get("acyclic", False) or objective == "pipeline",
    )

    def is_allowed(part: Sequence[int]) -> bool:
        return keeps_limits(problem, keeps, np.asarray(part, np.int32))

    part = lowered(problem, found.part, held, wanted.tolist(), search["budget_s"] / 4, is_allowed)
    return replace(found, problem=problem, part=tuple(part), proved=False)
