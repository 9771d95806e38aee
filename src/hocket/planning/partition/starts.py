"""Starts of the search: the paper's two (Tavarageri et al., section 2, phase 3), METIS's and Mt-KaHyPar's.

The refinement of Tavarageri et al. (section 2, phase 4).

For an op n on device p, D(n, p) = E - I: the bytes of its incoming tensors from other devices, minus those from p. The
op of the least D moves to another device if its D falls, the target device stays below its target plus epsilon, and
the source device stays above its target minus epsilon. An op also moves if that brings both devices nearer to their
targets without passing them. The refinement ends when no op may move, or after `MAX_MOVES`, since an op that moved for
balance may move back for bytes.

An incoming tensor counts for each op that reads it and not for its source, so the cost differs from that of the
compiled search (`hocket.planning.partition.search`). This refinement is its baseline, and its replacement without a
compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.errors import MissingDependencyError
from hocket.ir import list_order
from hocket.planning.partition.problem import PartitionProblem

MAX_MOVES = 2_000
# Both libraries use integers. This is the total weight of a graph.
_RESOLUTION = 10_000_000


def topological_order(nodes: int, waits: Iterable[tuple[int, int]], seed: int | None = None) -> list[int]:
    """A topological order of the numbers from 0: the least ready one first, or a random one.

    A random order goes deep: the readers of the last node come first.
    """
    waiting = [0] * nodes
    onward: list[list[int]] = [[] for _ in range(nodes)]
    for src, dst in waits:
        onward[src].append(dst)
        waiting[dst] += 1
    draw = None if seed is None else np.random.default_rng(seed)
    order: list[int] = []
    counts = dict(enumerate(waiting))
    for node in list_order(counts, dict(enumerate(onward)), lambda _: draw.random() - len(order) if draw else 0.0):
        order.append(node)  # noqa: PERF402 - the key reads its length
    return order


def block_start(problem: PartitionProblem, seed: int | None = None) -> NDArray[np.int32]:
    """Block partitioning: a topological order cut where the work so far reaches the parts' targets.

    Groups are ordered by the waits between them, with those of the backward pass reversed if groups hold both passes.
    No cut separates groups that wait for each other in a circle, so parts never wait in a circle.

    The order is the one closest to the given one, or with a `seed` a random one.
    """
    if not len(problem):
        return np.zeros(0, np.int32)
    component, order = block_order(problem, seed)
    work = np.bincount(component, problem.by_group(problem.work_us), len(order))[order]
    work += 1e-9 * max(work.sum(), 1e-300) / max(len(order), 1)
    borders = np.cumsum(problem.shares)[:-1] * work.sum()
    of_component = np.empty(len(order), np.int32)
    of_component[order] = np.searchsorted(borders, np.cumsum(work) - work / 2, side="right")
    return of_component[component][problem.group]


def block_order(problem: PartitionProblem, seed: int | None = None) -> tuple[list[int], list[int]]:
    """For each group its component of groups that wait for each other, and a topological order of the components."""
    component, between = block_waits(problem)
    return component, topological_order(max(component, default=-1) + 1, between, seed)


def block_waits(problem: PartitionProblem) -> tuple[list[int], list[tuple[int, int]]]:
    """For each group its component of groups that wait for each other, and the waits between components."""
    forward, backward = problem.waits_by_pass
    waits = list(dict.fromkeys([*forward, *((dst, src) for src, dst in backward)]))
    component = circles(problem.num_groups, waits)
    pairs = ((component[src], component[dst]) for src, dst in waits)
    return component, list(dict.fromkeys((src, dst) for src, dst in pairs if src != dst))


def circles(nodes: int, waits: Iterable[tuple[int, int]]) -> list[int]:
    """Strongly connected components, numbered in the order of their first node.

    The algorithm is S. R. Kosaraju's: from the last finished of a depth-first search, all nodes that lead there.
    """
    onward: list[list[int]] = [[] for _ in range(nodes)]
    back: list[list[int]] = [[] for _ in range(nodes)]
    for src, dst in waits:
        onward[src].append(dst)
        back[dst].append(src)
    finished: list[int] = []
    seen = [False] * nodes
    for root in range(nodes):
        path = [] if seen[root] else [(root, iter(onward[root]))]
        seen[root] = True
        while path:
            node, ahead = path[-1]
            following = next((other for other in ahead if not seen[other]), None)
            if following is None:
                finished.append(path.pop()[0])
            else:
                seen[following] = True
                path.append((following, iter(onward[following])))
    leader = [-1] * nodes
    for root in reversed(finished):
        reached = [root] if leader[root] < 0 else []
        while reached:
            node = reached.pop()
            if leader[node] < 0:
                leader[node] = root
                reached += back[node]
    number: dict[int, int] = {}
    return [number.setdefault(root, len(number)) for root in leader]


def random_start(problem: PartitionProblem, seed: int) -> NDArray[np.int32]:
    """Each op on a device at random: random partitioning."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, problem.num_parts, problem.num_groups).astype(np.int32)[problem.group]


def metis_start(problem: PartitionProblem, epsilon: float, seed: int = 0) -> NDArray[np.int32]:
    """METIS's partition of the graph that has an edge from the source of each tensor to each of its readers."""
    try:
        import pymetis
    except ImportError:
        raise MissingDependencyError("pymetis", "partition", "METIS's partition") from None
    nets = _nets(problem)
    most = max((size for _, _, size in nets), default=1.0)
    neighbours: list[dict[int, int]] = [{} for _ in range(problem.num_groups)]
    for source, readers, size in nets:
        weight = max(1, round(size / most * 100_000))
        for reader in readers:
            for one, other in ((source, reader), (reader, source)):
                neighbours[one][other] = neighbours[one].get(other, 0) + weight
    adjacency = pymetis.CSRAdjacency(
        np.cumsum([0, *map(len, neighbours)]).tolist(), [other for row in neighbours for other in row]
    )
    _, part = pymetis.part_graph(
        problem.num_parts,
        adjacency,
        vweights=_whole(problem, 1_000_000),
        eweights=[weight for row in neighbours for weight in row.values()],
        tpwgts=problem.shares.tolist(),
        options=pymetis.Options(ufactor=max(1, int(epsilon * 1000)), seed=seed),
    )
    return np.asarray(part, np.int32)[problem.group]


def mtkahypar_start(problem: PartitionProblem, epsilon: float, seed: int = 0) -> NDArray[np.int32]:
    """Mt-KaHyPar's partition, for its objective km1, which is the bytes moved."""
    try:
        import mtkahypar
    except ImportError:
        raise MissingDependencyError("mtkahypar", "partition", "Mt-KaHyPar's partition") from None
    runtime = _mtkahypar_runtime()
    context = runtime.context_from_preset(mtkahypar.PresetType.DEFAULT)
    mtkahypar.set_seed(seed)
    context.set_partitioning_parameters(problem.num_parts, epsilon, mtkahypar.Objective.KM1)
    context.logging = False
    weights = _whole(problem, _RESOLUTION)
    if np.ptp(problem.shares) > 1e-9:
        most = [int((1 + epsilon) * share * sum(weights)) + 1 for share in problem.shares]
        context.set_individual_target_block_weights(most)
    nets = _nets(problem)
    largest = max((size for _, _, size in nets), default=1.0)
    hypergraph = runtime.create_hypergraph(
        context,
        problem.num_groups,
        len(nets),
        [[source, *readers] for source, readers, _ in nets],
        weights,
        [max(1, round(size / largest * 1_000_000)) for _, _, size in nets],
    )
    return np.asarray(hypergraph.partition(context).get_partition(), np.int32)[problem.group]


@cache
def _mtkahypar_runtime() -> Any:
    """Mt-KaHyPar, initialised once, since it warns about a second time. One thread gives repeatable results."""
    import mtkahypar

    return mtkahypar.initialize(1)


def _nets(problem: PartitionProblem) -> list[tuple[int, list[int], float]]:
    """The source, the other readers and the bytes of each tensor between groups."""
    group = problem.group.tolist()
    found = []
    for tensor in problem.tensors:
        source = group[tensor.source]
        readers = sorted({group[reader] for reader in tensor.readers} - {source})
        if readers and tensor.size_bytes > 0:
            found.append((source, readers, tensor.size_bytes))
    return found


def _whole(problem: PartitionProblem, resolution: int) -> list[int]:
    work = problem.by_group(problem.work_us)
    return [round(float(value)) for value in work / max(work.sum(), 1e-300) * resolution]


def refine(problem: PartitionProblem, part: Sequence[int], epsilon: float) -> NDArray[np.int32]:
    """`part` after moves of the paper's kind, in which groups move as one.

    `epsilon` is the largest distance of a part from its target, as a share of the target.
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
    for _ in range(MAX_MOVES):
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
        group, to = divmod(int(np.where(able, cost, np.inf).argmin()), parts)
        origin = at[group]
        at[group] = to
        load[[origin, to]] += (-work[group], work[group])
        held[[origin, to]] += (-memory[group], memory[group])
        for reader, size_bytes in readers[group]:
            incoming[reader, [origin, to]] += (-size_bytes, size_bytes)
    return at[problem.group]
