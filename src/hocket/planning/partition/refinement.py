"""The refinement of Tavarageri et al. (section 2, phase 4).

For an op n on device p, D(n, p) = E - I: the bytes of its incoming tensors from other devices, minus those from p. The
op of the least D moves to another device if its D falls, the target device stays below its target plus epsilon, and
the source device stays above its target minus epsilon. An op also moves if that brings both devices nearer to their
targets without passing them. The refinement ends when no op may move, or after `max_moves`, since an op that moved for
balance may move back for bytes.

An incoming tensor counts for each op that reads it and not for its source, so the cost differs from that of the
compiled search (`hocket.planning.partition.search`). This refinement is its baseline, and its replacement without a
compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem


def refine(
    problem: PartitionProblem, part: Sequence[int], epsilon: float, max_moves: int | None = None
) -> NDArray[np.int32]:
    """`part` after moves of the paper's kind, in which groups move as one.

    Args:
        problem: ops and devices.
        part: the part of each op.
        epsilon: the largest distance of a part from its target, as a share of the target.
        max_moves: the budget, by default ten moves for each group.

    Example:
        >>> from hocket.planning.partition.problem import Tensor
        >>> chain = tuple(Tensor(op, (op + 1,), 8.0) for op in range(3))
        >>> problem = PartitionProblem(("a", "b", "c", "d"), np.ones((4, 2)), chain)
        >>> refine(problem, [0, 0, 1, 0], epsilon=0.25).tolist()
        [0, 0, 1, 1]
    """
    groups, parts = problem.num_groups, problem.num_parts
    work = problem.by_group(problem.work_us)
    memory = problem.by_group(problem.memory_bytes)
    target = problem.shares * work.sum()
    slack = epsilon * target
    at = np.zeros(groups, np.int32)
    at[problem.group] = np.asarray(part, np.int32)
    load = np.bincount(at, work, parts)
    held = np.bincount(at, memory, parts)
    incoming = np.zeros((groups, parts))  # bytes that come from each device
    readers: list[list[tuple[int, float]]] = [[] for _ in range(groups)]
    for tensor in problem.tensors:
        source = int(problem.group[tensor.source])
        for reader in {int(problem.group[r]) for r in tensor.readers} - {source}:
            incoming[reader, at[source]] += tensor.size_bytes
            readers[source].append((reader, tensor.size_bytes))
    everything = incoming.sum(axis=1, keepdims=True)
    rows = np.arange(groups)
    for _ in range(10 * groups if max_moves is None else max_moves):
        cost = everything - 2 * incoming  # D = E - I on each device
        here = cost[rows, at]
        falls = cost < here[:, None]
        fits = load + work[:, None] <= target + slack
        spared = (load[at] - work >= (target - slack)[at])[:, None]
        repairs = (load + work[:, None] < target) & ((load[at] - work > target[at])[:, None])
        able = ((falls & fits & spared) | repairs) & (held + memory[:, None] <= problem.memory_limit_bytes)
        able[rows, at] = False
        if not able.any():
            break
        choice = np.where(able, cost, np.inf)
        group, to = divmod(int(choice.argmin()), parts)
        origin = at[group]
        at[group] = to
        load[[origin, to]] += (-work[group], work[group])
        held[[origin, to]] += (-memory[group], memory[group])
        for reader, size_bytes in readers[group]:
            incoming[reader, [origin, to]] += (-size_bytes, size_bytes)
    return at[problem.group]
