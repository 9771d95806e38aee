"""Partitions whose parts keep their peak memory within limits.

The search limits the sum of what ops keep on their device. The peak differs: it is the sum at one moment, and includes
copies of exchanged tensors. So the result is judged by its peaks. If those are too high, moves of ops lower them
(`lowered`). Both are then tried from other partitions: with less memory for each part in the search, and with the
fewest bytes moved, which means the fewest copies.

What ops keep says little about a peak (`PartPeaks`), and often no move of a single op lowers it, since several tensors
are alive at that moment. So a move takes all ops of a part that touch one tensor of that moment, or one group of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.planning.critical_path.memory import PartPeaks
from hocket.planning.partition.partitioned import Partition, partitioned
from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.search import keeps_limits, wanted_for

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

    `limits` are the bytes of each part, and `peaks` gives more exact ones than `held`. With `is_promise` the limits
    have to be kept. Otherwise, if no partition keeps them, the result of the search without limits is returned,
    which has the best objective.
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
    problem = replace(found.problem, memory_limit_bytes=np.full(len(wanted), np.inf))
    limited = {key: search[key] for key in ("objective", "epsilon", "two_sided", "acyclic") if key in search}
    keeps = wanted_for(**limited)

    def is_allowed(part: Sequence[int]) -> bool:
        return keeps_limits(problem, keeps, np.asarray(part, np.int32))

    part = lowered(problem, found.part, held, wanted.tolist(), search["budget_s"] / 4, is_allowed)
    return replace(found, problem=problem, part=tuple(part), proved=False)


# The number of tensors of a peak, the largest ones, whose ops may move.
MAX_TENSORS = 12


def lowered(
    problem: PartitionProblem,
    part: Sequence[int],
    peaks: PartPeaks,
    limits: Sequence[float],
    budget_s: float,
    is_allowed: Callable[[Sequence[int]], bool],
) -> list[int]:
    """Move ops until all peaks are within the limits, or no move helps, and return the partition.

    Each round makes the steepest move that lowers the part farthest above its limit.

    Each partition that may be returned `is_allowed`.
    """
    until = monotonic() + budget_s
    found = list(part)

    def distance(candidate: Sequence[int]) -> tuple[float, float]:
        shares = [peak / limit for peak, limit in zip(peaks.of(candidate), limits, strict=True)]
        return max(shares), sum(share * share for share in shares)

    best = distance(found)
    while best[0] > 1.0:
        shares = [peak / limit for peak, limit in zip(peaks.of(found), limits, strict=True)]
        tried: list[tuple[tuple[float, float], list[int]]] = []
        for ops, target in _moves(problem, found, peaks, int(np.argmax(shares))):
            if monotonic() > until:
                return found
            candidate = list(found)
            for op in ops:
                candidate[op] = target
            tried.append((distance(candidate), candidate))
        better = [(far, candidate) for far, candidate in tried if far < best and is_allowed(candidate)]
        if not better:
            return found
        best, found = min(better, key=lambda each: each[0])
    return found


def _moves(
    problem: PartitionProblem, part: Sequence[int], peaks: PartPeaks, number: int
) -> Iterator[tuple[list[int], int]]:
    """Ops that may leave a part together, each with a target."""
    members: dict[int, list[int]] = {}
    for op, group in enumerate(problem.group.tolist()):
        members.setdefault(group, []).append(op)
    seen: set[frozenset[int]] = set()
    for buffer in peaks.at_peak(part, number)[:MAX_TENSORS]:
        groups = list(dict.fromkeys(int(problem.group[op]) for op in peaks.touching(part, number, buffer)))
        for chosen in [groups, *([group] for group in groups)]:
            if chosen and frozenset(chosen) not in seen:
                seen.add(frozenset(chosen))
                ops = [op for group in chosen for op in members[group]]
                for target in range(problem.num_parts):
                    if target != number:
                        yield ops, target
