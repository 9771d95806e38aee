"""Costs of a partition, computed from scratch. Tests compare them with the incremental ones of the search."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem


def bytes_moved(problem: PartitionProblem, part: Sequence[int]) -> float:
    """Bytes that cross between parts, each tensor once for each part that reads it and does not make it."""
    return sum(t.size_bytes * (len({part[t.source], *(part[r] for r in t.readers)}) - 1) for t in problem.tensors)


def work_of_parts(problem: PartitionProblem, part: Sequence[int]) -> NDArray[np.float64]:
    """The work in each part, in the unit that is balanced."""
    return np.bincount(np.asarray(part), problem.work_us, problem.num_parts).astype(np.float64)


def imbalance(problem: PartitionProblem, part: Sequence[int]) -> float:
    """The largest distance of a part's work from its target, as a share of the target."""
    work = work_of_parts(problem, part)
    target = problem.shares * work.sum()
    if work.sum() == 0.0:
        return 0.0
    return float(np.max(np.abs(work - target) / target))


def loads_us(problem: PartitionProblem, part: Sequence[int]) -> NDArray[np.float64]:
    """For each device the time of its ops and of one transfer of each tensor that crosses its border."""
    found = np.zeros(problem.num_parts)
    np.add.at(found, np.asarray(part), problem.duration_us[np.arange(len(problem)), np.asarray(part)])
    for tensor in problem.tensors:
        touched = {part[tensor.source], *(part[reader] for reader in tensor.readers)}
        for at in touched if len(touched) > 1 else ():
            found[at] += tensor.transfer_us * problem.transfer_price[at]
    return found


def pipeline_us(problem: PartitionProblem, part: Sequence[int], micro_batches: int) -> float:
    """The time of `micro_batches` in a row: all stages once, and the slowest again for each further micro-batch.

    This is the time of GPipe and of 1F1B with constant costs, of which (sum - slowest) is the bubble.
    """
    loads = loads_us(problem, part)
    return float(loads.sum() + (micro_batches - 1) * loads.max())


def part_cycle(problem: PartitionProblem, part: Sequence[int]) -> tuple[int, ...] | None:
    """Parts that wait for each other in a circle, or None. Waits count as in `PartitionProblem.waits_by_pass`."""
    of_group = dict(zip(problem.group.tolist(), map(int, part), strict=True))
    for waits in problem.waits_by_pass:
        before: dict[int, set[int]] = {}
        for src, dst in waits:
            if of_group[src] != of_group[dst]:
                before.setdefault(of_group[dst], set()).add(of_group[src])
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle = error.args[1][:-1]
            at = circle.index(min(circle))
            return (*circle[at:], *circle[:at])
    return None


def simulated_us(problem: PartitionProblem, part: Sequence[int], order: Sequence[int]) -> float:
    """The end of the last op."""
    return max((end for _, end in simulated_spans(problem, part, order)), default=0.0)


def simulated_spans(problem: PartitionProblem, part: Sequence[int], order: Sequence[int]) -> list[tuple[float, float]]:
    """The start and end of each op of `order`.

    Each device runs its ops in that order, and a tensor arrives its transfer time after its source has finished,
    whatever other transfers there are.
    """
    before: dict[int, list[tuple[int, float]]] = {}
    for (src, dst), delay_us in problem.delays_us.items():
        before.setdefault(dst, []).append((src, delay_us))
    idle_us = [0.0] * problem.num_parts
    finish_us: dict[int, float] = {}
    spans = []
    for op in order:
        at = part[op]
        arrived = [finish_us[src] + (0.0 if part[src] == at else delay_us) for src, delay_us in before.get(op, ())]
        start_us = max([idle_us[at], *arrived])
        finish_us[op] = idle_us[at] = start_us + float(problem.duration_us[op, at])
        spans.append((start_us, finish_us[op]))
    return spans
