"""The partitions of METIS and Mt-KaHyPar, which ours are compared with."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.errors import MissingDependencyError
from hocket.planning.partition.problem import PartitionProblem

# Both libraries use integers. This is the total weight of a graph.
_RESOLUTION = 10_000_000


def metis_start(problem: PartitionProblem, epsilon: float, seed: int = 0) -> NDArray[np.int32]:
    """METIS's partition of the graph that has an edge from the source of each tensor to each of its readers.

    Raises:
        MissingDependencyError: pymetis is not installed.
    """
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
    """Mt-KaHyPar's partition, for its objective km1, which is the bytes moved.

    Raises:
        MissingDependencyError: mtkahypar is not installed.
    """
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
