"""Contiguous parts with the least largest load, by dynamic programming: starts for `load`.

An ideal is a set of ops that holds all ops before each of its own. The parts of an acyclic partition are the
differences of a chain of ideals, so dynamic programming over pairs of ideals finds the best one (Tarnawski et al.,
"Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020, section 5)::

    ideals {} < {a} < {a, b} < {a, b, c}    parts {a}, {b, c} from {} < {a} < {a, b, c}

Wide graphs have too many ideals. There `contiguous_start` takes the intervals of one topological order, in time that is
quadratic in the number of groups. Trying several orders makes up for some of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, permutations

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.starts import block_order, block_waits

# The table has the square of this many numbers.
MAX_BLOCKS = 1500


def contiguous_start(problem: PartitionProblem, seed: int | None = None) -> NDArray[np.int32] | None:
    """The intervals with the least largest load, or None if none fit the memory or there are too many ops.

    Devices get intervals in their order, some of which may be empty. The order of ops is the one closest to the
    given one, or with a `seed` a random one.
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

    def load_of(device: int) -> NDArray[np.float64]:
        load = moved_us * problem.transfer_price[device] + takes_us[None, :, device] - takes_us[:, None, device]
        load[behind | (held[None, :] - held[:, None] > problem.memory_limit_bytes[device])] = np.inf
        return load

    least_us, borders = least_largest(map(load_of, range(problem.num_parts)), count + 1)
    if not np.isfinite(least_us):
        return None
    return np.repeat(np.arange(problem.num_parts, dtype=np.int32), np.diff(borders))[at]


def least_largest(loads: Iterable[NDArray[np.float64]], places: int) -> tuple[float, list[int]]:
    """The least largest load of intervals that follow each other, and the places where they begin and end.

    A load is by begin and end, infinite where an interval may not be. The first interval begins at the first place,
    and the last one ends at the last.
    """
    best = np.where(np.arange(places) == 0, 0.0, np.inf)
    choices = []
    for load in loads:
        worst = np.maximum(best[:, None], load)
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    borders = [places - 1]
    for choice in reversed(choices):
        borders.append(int(choice[borders[-1]]))
    return float(best[-1]), borders[::-1]


def _sums(values: NDArray[np.float64], at: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Sums over all places before each one, for each column."""
    return np.cumsum(np.concatenate([np.zeros((1, values.shape[1])), _summed(values, at, count)]), axis=0)


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


# Two thousand ideals of a graph of 400 ops take about two seconds.
MAX_IDEALS = 4000
MAX_LOADS = 16_000_000
# Number of orders of devices that are tried. Devices of equal times, memory and price are interchangeable.
MAX_ORDERS = 24


def ideal_start(problem: PartitionProblem, most_us: float = np.inf) -> NDArray[np.int32] | None:
    """The best contiguous parts, or None if there are too many ideals or none are below a load of `most_us`."""
    component, waits = block_waits(problem)
    count = max(component, default=-1) + 1
    ideals = _ideals(count, waits)
    if ideals is None or count == 0:
        return None
    of_op = np.asarray(component)[problem.group]
    takes_us = ideals @ _summed(problem.duration_us, of_op, count)
    held = ideals @ _summed(problem.memory_bytes[:, None], of_op, count)[:, 0]
    pairs = _pairs(problem, ideals, of_op, takes_us, most_us)
    if pairs is None or not len(pairs[0]):
        return None
    begin, end, border_us = pairs
    loads = np.empty((problem.num_parts, len(begin)))
    for device in range(problem.num_parts):
        load = takes_us[end, device] - takes_us[begin, device] + border_us * problem.transfer_price[device]
        load[held[end] - held[begin] > problem.memory_limit_bytes[device]] = np.inf
        loads[device] = load
    used: tuple[int, ...] = ()
    least_us, chain = most_us, None
    for order in _orders(problem):
        found_us, found = _best_chain(loads, begin, end, len(ideals), order)
        if found_us < least_us:
            least_us, chain, used = found_us, found, order
    if chain is None:
        return None
    part = np.empty(count, np.int32)
    for device, before, after in zip(used, chain, chain[1:], strict=False):
        part[ideals[after] & ~ideals[before]] = device
    return part[of_op]


def _ideals(count: int, waits: Sequence[tuple[int, int]]) -> NDArray[np.bool_] | None:
    """A row for each ideal, the smallest first, or None if there are too many."""
    before = [0] * count
    for src, dst in waits:
        before[dst] |= 1 << src
    found = [0]
    layer = [0]
    while layer:
        larger: dict[int, None] = {}
        for ideal in layer:
            for node in range(count):
                if not ideal >> node & 1 and not before[node] & ~ideal:
                    larger[ideal | 1 << node] = None
        layer = list(larger)
        found += layer
        if len(found) > MAX_IDEALS:
            return None
    size = (count + 7) // 8
    rows = np.frombuffer(b"".join(ideal.to_bytes(size, "little") for ideal in found), np.uint8)
    return np.unpackbits(rows.reshape(len(found), size), axis=1, bitorder="little")[:, :count].astype(np.bool_)


def _summed(values: NDArray[np.float64], of_op: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    found = np.zeros((count, values.shape[1]))
    np.add.at(found, of_op, values)
    return found


def _pairs(
    problem: PartitionProblem,
    ideals: NDArray[np.bool_],
    of_op: NDArray[np.int64],
    takes_us: NDArray[np.float64],
    most_us: float,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]] | None:
    """Pairs of ideals whose difference may be a part, with the transfer time of the tensors that cross its border."""
    cost_of: dict[tuple[int, ...], float] = {}
    for tensor in problem.tensors:
        nodes = tuple(sorted({int(of_op[op]) for op in (tensor.source, *tensor.readers)}))
        if len(nodes) > 1:
            cost_of[nodes] = cost_of.get(nodes, 0.0) + tensor.transfer_us
    cost = np.array(list(cost_of.values()))
    matrix = np.zeros((ideals.shape[1], len(cost)), np.float32)
    for column, nodes in enumerate(cost_of):
        matrix[nodes, column] = 1.0
    size = matrix.sum(axis=0).astype(np.int16)
    inside = (ideals.astype(np.float32) @ matrix).astype(np.int16)  # pins of each tensor in each ideal
    packed = np.packbits(ideals, axis=1)
    begins, ends, borders = [], [], []
    number = 0
    for begin in range(len(ideals)):  # larger ideals follow
        larger = begin + np.flatnonzero((takes_us[begin:] - takes_us[begin]).min(axis=1) < most_us)
        larger = larger[~(packed[begin] & ~packed[larger]).any(axis=1)]
        pinned = inside[larger] - inside[begin]
        borders.append(((pinned > 0) & (pinned < size)) @ cost)
        ends.append(larger.astype(np.int32))
        begins.append(np.full(len(larger), begin, np.int32))
        number += len(larger)
        if number * problem.num_parts > MAX_LOADS:
            return None
    return np.concatenate(begins), np.concatenate(ends), np.concatenate(borders)


def _orders(problem: PartitionProblem) -> list[tuple[int, ...]]:
    """Orders of the devices, those that differ only by devices of one kind once."""
    kinds: dict[bytes, int] = {}
    kind_of = [
        kinds.setdefault(
            problem.duration_us[:, device].tobytes()
            + problem.memory_limit_bytes[device].tobytes()
            + problem.transfer_price[device].tobytes(),
            device,
        )
        for device in range(problem.num_parts)
    ]
    if len(kinds) == 1:
        return [tuple(range(problem.num_parts))]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in islice(permutations(range(problem.num_parts)), 5040):
        found.setdefault(tuple(kind_of[device] for device in order), order)
        if len(found) == MAX_ORDERS:
            break
    return list(found.values())


def _best_chain(
    loads: NDArray[np.float64], begin: NDArray[np.int32], end: NDArray[np.int32], count: int, order: Sequence[int]
) -> tuple[float, list[int]]:
    """The least largest load of the devices in this order, and the ideals between their parts."""
    by_end = np.argsort(end, kind="stable")
    first = np.flatnonzero(np.diff(end[by_end], prepend=-1))  # every ideal is the end of a pair with itself
    best = np.where(np.arange(count) == 0, 0.0, np.inf)
    choices = []
    for device in order:
        worst = np.maximum(best[begin], loads[device])[by_end]
        best = np.minimum.reduceat(worst, first)
        is_best = worst == np.repeat(best, np.diff(first, append=len(worst)))
        chosen = np.full(count, -1, np.int32)
        ranked = by_end[is_best]
        chosen[end[ranked]] = begin[ranked]
        choices.append(chosen)
    chain = [count - 1]
    for chosen in reversed(choices):
        chain.append(int(chosen[chain[-1]]))
    return float(best[-1]), chain[::-1]
