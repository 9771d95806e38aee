"""Contiguous parts of a topological order with the least largest load, by dynamic programming: a start for `load`.

The parts are intervals of one order, a special case of the contiguous parts of Tarnawski et al. ("Efficient algorithms
for device placement of DNN graph operators", NeurIPS 2020). The time is quadratic in the number of groups instead of
linear in the number of ideals of the graph. Trying several orders makes up for some of the loss.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.starts import block_order

# The table has the square of this many numbers.
MAX_BLOCKS = 1500


def contiguous_start(problem: PartitionProblem, seed: int | None = None) -> NDArray[np.int32] | None:
    """The intervals with the least largest load, or None if none fit the memory or there are too many ops.

    Args:
        problem: ops and devices. Devices get intervals in their order, some of which may be empty.
        seed: of a random topological order. By default the order is the one closest to the given one.

    Example:
        >>> from hocket.planning.partition.problem import Tensor
        >>> chain = (Tensor(0, (1,), 1.0, 9.0), Tensor(1, (2,), 1.0, 1.0))
        >>> problem = PartitionProblem(("a", "b", "c"), np.full((3, 2), 10.0), chain)
        >>> contiguous_start(problem).tolist()
        [0, 0, 1]
    """
    component, order = block_order(problem, seed)
    count = len(order)
    if not 0 < count <= MAX_BLOCKS:
        return None
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    at = place[np.asarray(component)][problem.group]  # of each op
    moved_us = _border_us(problem, at, count)
    takes_us = _sums(problem.duration_us, at, count)
    held = _sums(problem.memory_bytes[:, None], at, count)[:, 0]
    behind = np.tri(count + 1, k=-1, dtype=np.bool_)  # intervals that end before they begin
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    choices = []
    for device in range(problem.num_parts):
        load = moved_us * problem.transfer_price[device] + takes_us[None, :, device] - takes_us[:, None, device]
        load[behind | (held[None, :] - held[:, None] > problem.memory_limit_bytes[device])] = np.inf
        worst = np.maximum(best[:, None], load)
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if not np.isfinite(best[count]):
        return None
    part = np.empty(count, np.int32)
    end = count
    for device in range(problem.num_parts - 1, -1, -1):
        begin = int(choices[device][end])
        part[begin:end] = device
        end = begin
    return part[at]


def _sums(values: NDArray[np.float64], at: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Sums over all places before each one, for each column."""
    found = np.zeros((count + 1, values.shape[1]))
    np.add.at(found, at + 1, values)
    return np.cumsum(found, axis=0)


def _border_us(problem: PartitionProblem, at: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Transfer time of the tensors that cross the border of each interval, by its begin and end."""
    cost = np.array([tensor.transfer_us for tensor in problem.tensors])
    pins = [sorted({int(at[op]) for op in (tensor.source, *tensor.readers)}) for tensor in problem.tensors]
    first = np.array([found[0] for found in pins], np.int64)
    last = np.array([found[-1] for found in pins], np.int64)
    touching: list[list[int]] = [[] for _ in range(count)]
    for net, found in enumerate(pins):
        for place in found:
            touching[place].append(net)
    following = np.full(len(pins), count)  # the first place of each tensor at or after the begin
    result = np.zeros((count + 1, count + 1))
    for begin in range(count - 1, -1, -1):
        following[touching[begin]] = begin
        change = np.zeros(count + 2)
        np.add.at(change, following + 1, cost)  # the interval reaches it
        inside = first >= begin
        np.subtract.at(change, last[inside] + 1, cost[inside])  # the interval has all of it
        result[begin] = np.cumsum(change)[: count + 1]
    return result
