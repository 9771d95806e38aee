"""Random problems, and the best partition of small ones by trying all."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from hocket.planning.partition import PartitionProblem, Tensor
from hocket.planning.partition.search import Wanted, keeps_limits


def random_problem(seed: int, *, ops: int, parts: int, density: float = 0.4, ratio: float = 1.0, **fields: object):
    """A random DAG; moving a tensor takes `ratio` times as long as an op, on average."""
    draw = np.random.default_rng(seed)
    takes_us = draw.uniform(1, 10, ops)
    readers: dict[int, list[int]] = {}
    for reader in range(1, ops):
        for source in range(reader):
            if draw.random() < density:
                readers.setdefault(source, []).append(reader)
    tensors = []
    for source, found in readers.items():
        transfer_us = float(draw.uniform(0.2, 1.8) * takes_us.mean() * ratio)
        tensors.append(Tensor(source, tuple(found), float(draw.integers(1, 100)), transfer_us))
    waits = [(source, reader) for source, found in readers.items() for reader in found]
    names = tuple(f"op{number}" for number in range(ops))
    return PartitionProblem(names, np.repeat(takes_us[:, None], parts, 1), tuple(tensors), waits, **fields)


def all_partitions(problem: PartitionProblem, wanted: Wanted) -> Iterator[Sequence[int]]:
    """Every partition that keeps the limits."""
    for by_group in product(range(problem.num_parts), repeat=problem.num_groups):
        part = np.array(by_group, np.int32)[problem.group]
        if keeps_limits(problem, wanted, part):
            yield part.tolist()
