"""Partitions by what their parts hold at their peaks."""

import itertools
import random

import numpy as np
import pytest

from hocket.ir import Buffer, Edge, Graph, Op
from hocket.planning.partition import PartitionProblem, PartPeaks, Tensor, partitioned_within
from hocket.planning.partition.within_memory import lowered

SEARCH = {"objective": "load", "epsilon": None, "budget_s": 0.4, "rounds": 20, "seed": 0}


def chain(ops: int = 8) -> tuple[Graph, PartitionProblem]:
    """Ops with a weight each, which outlives the step; what they hand on takes longer to move than all ops."""
    names = tuple(f"op{at}" for at in range(ops))
    graph = Graph(
        tuple(Op(name, reads=(f"w{at}",), writes=()) for at, name in enumerate(names)),
        tuple(Edge(one, other) for one, other in itertools.pairwise(names)),
        buffers=tuple(Buffer(f"w{at}", 1.0, "lasting") for at in range(ops)),
    )
    tensors = tuple(Tensor(op, (op + 1,), 8.0, 50.0) for op in range(ops - 1))
    waits = tuple((op, op + 1) for op in range(ops - 1))
    return graph, PartitionProblem(names, np.ones((ops, 2)), tensors, waits, memory_bytes=np.ones(ops))


def held(limits, is_promise=True) -> list[float]:
    graph, problem = chain()
    peaks = PartPeaks(graph, graph.order, 2)
    return peaks.of(partitioned_within(problem, SEARCH, limits, peaks, is_promise=is_promise).part)


def test_a_partition_keeps_limits_that_its_objective_alone_does_not():
    assert sorted(held((8.0, 8.0))) == [0, 8]
    assert max(held((5.0, 5.0))) <= 5
    uneven = held((7.0, 2.0))
    assert uneven[0] <= 7
    assert uneven[1] <= 2
    assert max(held((5.0, 5.0), is_promise=False)) <= 5


def test_where_no_limit_can_be_kept_the_nearest_is_found_or_what_the_objective_alone_finds():
    assert held((3.0, 3.0)) == [4, 4]
    assert sorted(held((3.0, 3.0), is_promise=False)) == [0, 8]


def random_step(seed: int, ops: int = 14) -> Graph:
    draw = random.Random(seed)
    made, edges = [], []
    buffers = [Buffer(f"w{at}", float(draw.randint(1, 9)), "lasting") for at in range(4)]
    for at in range(ops):
        sources = draw.sample(range(at), min(at, draw.randint(0, 2)))
        reads = (*(f"x{source}" for source in sources), *([f"w{draw.randrange(4)}"] if draw.random() < 0.5 else []))
        made.append(Op(f"op{at}", reads=reads, writes=(f"x{at}",)))
        edges += [Edge(f"op{source}", f"op{at}") for source in sources]
        buffers.append(Buffer(f"x{at}", float(draw.randint(1, 9)), "kept" if draw.random() < 0.2 else "step"))
    return Graph(tuple(made), tuple(edges), buffers=tuple(buffers))


def peaks_op_by_op(graph: Graph, part: list[int]) -> list[float]:
    """The same by looking, after each op, at all that anybody still needs."""
    size = {buffer.name: buffer for buffer in graph.buffers}
    maker = {name: at for at, op in enumerate(graph.ops) for name in op.writes}
    peaks = []
    for here in range(max(part) + 1):
        users = {n: [at for at, op in enumerate(graph.ops) if n in op.reads and part[at] == here] for n in size}
        at_moments = []
        for now in range(len(graph)):
            total = 0.0
            for name, buffer in size.items():
                if buffer.life == "lasting":
                    total += buffer.size_bytes if users[name] else 0.0
                    continue
                made, is_own = maker[name], part[maker[name]] == here
                if made > now or not (is_own or users[name]):
                    continue
                needed = max([made if is_own else -1, *users[name]])
                total += buffer.size_bytes if buffer.life == "kept" or needed >= now else 0.0
            at_moments.append(total)
        peaks.append(max(at_moments))
    return peaks


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_peaks_are_those_of_a_walk_op_by_op(parts):
    for seed in range(40):
        graph, draw = random_step(seed), random.Random(seed)
        part = [*range(parts), *(draw.randrange(parts) for _ in range(14 - parts))]
        found = PartPeaks(graph, graph.order, parts)
        assert found.of(part) == pytest.approx(peaks_op_by_op(graph, part))
        for number in range(parts):
            at_peak = found.at_peak(part, number)
            assert sum(found.size_bytes[buffer] for buffer in at_peak) == pytest.approx(found.of(part)[number])


def test_what_no_op_writes_is_held_by_none_and_freed_by_none():
    """A graph without its transfers reads what a receive wrote."""
    graph = Graph((Op("a", reads=("x",)), Op("b", writes=("y",))), buffers=(Buffer("x", 8.0), Buffer("y", 8.0)))
    assert PartPeaks(graph, graph.order, 1).of([0, 0]) == [8.0]


def test_moves_lower_the_farthest_peak_and_keep_what_is_wanted():
    for seed in range(10):
        graph = random_step(seed)
        problem = PartitionProblem(tuple(graph.order), np.ones((14, 2)))
        peaks, part = PartPeaks(graph, graph.order, 2), [0] * 14
        limit = 0.7 * peaks.of(part)[0]
        moved = lowered(problem, part, peaks, (limit, limit), 5.0, lambda part: True)
        assert max(peaks.of(moved)) < peaks.of(part)[0]
        few = lowered(problem, part, peaks, (limit, limit), 5.0, lambda part: sum(part) <= 1)
        assert sum(few) <= 1
        assert lowered(problem, part, peaks, (1e9, 1e9), 5.0, lambda part: True) == part
