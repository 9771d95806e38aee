"""The objective `time`: devices and orders for the earliest end of the step, communication included.

``core/schedule.cpp`` searches. For small graphs (`PROOF_OPS`) it also tries to prove the optimum.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.planning.partition import compiled
from hocket.planning.partition.problem import PartitionProblem

PROOF_OPS = 12
PROOF_NODES = 30_000_000


def schedule(
    problem: PartitionProblem,
    *,
    start: NDArray[np.int32] | None = None,
    budget_s: float = 5.0,
    rounds: int = 12,
    seed: int = 0,
    proof_ops: int = PROOF_OPS,
) -> tuple[NDArray[np.int32], tuple[int, ...], bool]:
    """The device of each op, an order of all ops, and True if it is proved that no schedule is shorter.

    Args:
        problem: ops, tensors and waits. A tensor takes its transfer time to another device.
        start: a partition to begin with, in addition to the usual ones.
        budget_s: of the annealing.
        rounds: of the annealing.
        seed: of the annealing.
        proof_ops: the most ops for which branch and bound tries to prove the optimum.

    Raises:
        InputError: there is no compiler, or no assignment was found that fits the memory.
    """
    if not len(problem):
        return np.zeros(0, np.int32), (), True
    delays = problem.delays_us
    src = np.fromiter((pair[0] for pair in delays), np.int32)
    dst = np.fromiter((pair[1] for pair in delays), np.int32)
    delay = np.fromiter(delays.values(), np.float64)
    memory = problem.by_group(problem.memory_bytes)
    device, order = np.zeros(len(problem), np.int32), np.zeros(len(problem), np.int32)
    takes_us = ctypes.c_double()
    given = None if start is None else np.ascontiguousarray(start, np.int32)
    proved = compiled.library().hocket_schedule(
        *(len(problem), problem.num_parts, problem.duration_us.ctypes.data, len(delays)),
        *(src.ctypes.data, dst.ctypes.data, delay.ctypes.data, problem.num_groups, problem.group.ctypes.data),
        *(memory.ctypes.data, problem.memory_limit_bytes.ctypes.data),
        *(None if given is None else given.ctypes.data, seed, rounds, budget_s),
        PROOF_NODES if len(problem) <= proof_ops else 0,
        *(device.ctypes.data, order.ctypes.data, ctypes.byref(takes_us)),
    )
    if proved < 0:
        raise InputError(f"partition: no placement of {len(problem)} ops was found that fits the devices' memory")
    return device, tuple(int(op) for op in order), proved == 1
