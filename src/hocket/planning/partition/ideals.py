"""Whether any acyclic partition keeps the balance, decided for graphs that are narrow enough to list their ideals.

Parts that do not wait for each other in a circle have an order in which each waits only for earlier ones. So the ops of
the first j of them are an ideal: a set that contains all that its ops wait for. A chain of ideals that grow by what a
part may have is an acyclic partition, and there is none without one. Tarnawski et al. ("Efficient algorithms for device
placement of DNN graph operators", NeurIPS 2020) minimise over the same chains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.starts import group_waits

MAX_IDEALS = 20_000
# Pairs of ideals that are compared.
MAX_PAIRS = 4_000_000


def acyclic_by_ideals(
    problem: PartitionProblem, low: NDArray[np.float64], high: NDArray[np.float64]
) -> tuple[bool | None, NDArray[np.int32] | None]:
    """Whether there is an acyclic partition within limits, and one if there is.

    Args:
        problem: whose groups hold no ops of both passes, and whose devices are alike; others are not decided.
        low: the least work of each part.
        high: the most work of each part.

    Returns:
        True and the part of each op; False; or None: there are too many ideals.

    Example:
        >>> problem = PartitionProblem(("a", "b"), np.array([[1.0, 1.0], [3.0, 3.0]]), waits=((0, 1),))
        >>> acyclic_by_ideals(problem, np.zeros(2), np.full(2, 2.5))
        (False, None)
    """
    alike = all(len(set(values.tolist())) == 1 for values in (low, high, problem.memory_limit_bytes))
    if problem.two_passes or not alike:
        return None, None
    work, memory = problem.by_group(problem.work_us), problem.by_group(problem.memory_bytes)
    held = _ideals(problem, work, memory)
    if held is None:
        return None, None
    parts, whole = problem.num_parts, (1 << problem.num_groups) - 1
    total = float(work.sum())
    # Sums differ by the order in which they were made.
    rounding = 1e-9 * total
    least, most, room = float(low[0]) - rounding, float(high[0]) + rounding, float(problem.memory_limit_bytes[0])
    pairs = 0
    chains: dict[int, tuple[int, ...]] = {
        0: ()
    }  # each ideal that so many parts can have, with the chain that leads there
    for number in range(1, parts + 1):
        behind = parts - number
        wanted = [
            ideal
            for ideal, (size, _) in held.items()
            if number * least <= size <= number * most
            and behind * least <= total - size + rounding <= behind * most + 2 * rounding
        ]
        pairs += len(wanted) * len(chains)
        if pairs > MAX_PAIRS:
            return None, None
        found: dict[int, tuple[int, ...]] = {}
        for ideal in wanted:
            size, bytes_held = held[ideal]
            for before, chain in chains.items():
                work_us, kept = size - held[before][0], bytes_held - held[before][1]
                if before & ideal == before and least <= work_us <= most and kept <= room:
                    found[ideal] = (*chain, ideal)
                    break
        chains = found
    if whole not in chains:
        return False, None
    part = np.zeros(problem.num_groups, np.int32)
    for ideal in chains[whole][:-1]:
        part += np.array([not ideal >> group & 1 for group in range(problem.num_groups)], np.int32)
    return True, part[problem.group]


def _ideals(
    problem: PartitionProblem, work: NDArray[np.float64], memory: NDArray[np.float64]
) -> dict[int, tuple[float, float]] | None:
    """Every ideal as the bits of its groups, with its work and memory; None if there are too many."""
    needs = [0] * problem.num_groups
    for source, reader in group_waits(problem):
        needs[reader] |= 1 << source
    found = {0: (0.0, 0.0)}
    ahead = [0]
    while ahead:
        ideal = ahead.pop()
        size, held = found[ideal]
        for group, needed in enumerate(needs):
            larger = ideal | 1 << group
            if larger != ideal and needed & ideal == needed and larger not in found:
                found[larger] = (size + float(work[group]), held + float(memory[group]))
                ahead.append(larger)
        if len(found) > MAX_IDEALS:
            return None
    return found
