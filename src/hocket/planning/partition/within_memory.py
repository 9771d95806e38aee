"""Partitions of which no part holds more than it may at its peak.

The search adds up what ops keep on their device, which tells little of the peak: that is a moment, and counts copies of
what parts exchange. So what it finds is judged by its peaks. Where those are too high, ops move that lower them
(`lowered`); and both are tried from other partitions: those of less that the search may give each part, and of the
fewest bytes moved, which are the fewest copies.
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

# What the search may give a part, as a share of all that ops keep, over the part's share of the limits.
ROOMS = (1.2, 1.04)
# How far the work of a part may be from its share where few bytes are moved and nothing was said of balance.
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
    """A partition of which no part's peak is above its limit; where none was found, the nearest one.

    Args:
        problem: ops and devices.
        search: arguments of `partitioned`.
        limits: of each part, in bytes.
        held: the peaks of the problem's graph.
        peaks: what each part holds by a partition, where that is told more exactly than by `held`.
        is_promise: limits have to be kept; otherwise, where none keeps them, what the search finds without them is
            returned: its objective is only paid for what was wanted.

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
        # Moves cost balance and bytes moved: only a promise is worth that.
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
                continue  # there is none with so little room


def _moved(found: Partition, search: Mapping[str, Any], wanted: NDArray[np.float64], held: PartPeaks) -> Partition:
    """After moves that lower its peaks, and keep what the search was to keep."""
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
