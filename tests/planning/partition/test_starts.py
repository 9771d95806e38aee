import numpy as np
import pytest
from tests.planning.partition.cases import all_partitions, random_problem

from hocket.errors import MissingDependencyError
from hocket.planning.partition import PartitionProblem, Tensor, contiguous, partitioned
from hocket.planning.partition.contiguous import contiguous_start, ideal_start
from hocket.planning.partition.evaluation import bytes_moved, imbalance, loads_us, part_cycle, work_of_parts
from hocket.planning.partition.search import Wanted, keeps_limits
from hocket.planning.partition.starts import (
    block_start,
    circles,
    metis_start,
    mtkahypar_start,
    random_start,
    refine,
    topological_order,
)


def test_blocks_have_their_share_and_no_cycle():
    for seed in range(10):
        problem = random_problem(seed, ops=60, parts=4, density=0.1)
        for drawn in (None, seed):
            part = block_start(problem, drawn)
            target = problem.work_us.sum() / 4
            assert np.all(np.abs(work_of_parts(problem, part.tolist()) - target) <= problem.work_us.max())
            assert part_cycle(problem, part.tolist()) is None


def test_blocks_are_larger_on_faster_devices():
    problem = PartitionProblem(tuple(map(str, range(8))), np.ones((8, 2)) * [1.0, 3.0])
    assert block_start(problem).tolist() == [0] * 6 + [1] * 2


def test_no_block_ends_within_groups_that_wait_for_each_other():
    problem = PartitionProblem(
        tuple("abcd"), np.ones((4, 2)), waits=((0, 1), (1, 2), (2, 3)), group=np.array([0, 1, 0, 2])
    )
    part = block_start(problem).tolist()
    assert part[0] == part[1] == part[2] != part[3]


def test_orders_and_circles():
    assert topological_order(4, [(3, 0), (0, 1)]) == [2, 3, 0, 1]
    assert circles(6, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 3)]) == [0, 0, 0, 1, 1, 2]
    orders = {tuple(topological_order(6, [(0, 5)], seed)) for seed in range(20)}
    assert len(orders) > 5
    assert all(order.index(0) < order.index(5) for order in orders)


def test_random_starts_differ_and_keep_groups():
    problem = random_problem(0, ops=30, parts=3, group=np.repeat(np.arange(10), 3))
    parts = [random_start(problem, seed) for seed in (0, 0, 1)]
    assert parts[0].tolist() == parts[1].tolist() != parts[2].tolist()
    assert np.all(parts[0].reshape(10, 3) == parts[0].reshape(10, 3)[:, :1])


def test_the_papers_refinement_moves_fewer_bytes_within_the_balance():
    better = 0
    for seed in range(10):
        problem = random_problem(seed, ops=80, parts=4, density=0.04)
        start = block_start(problem)
        slack = max(0.1, imbalance(problem, start.tolist()))
        part = refine(problem, start.tolist(), slack)
        assert imbalance(problem, part.tolist()) <= slack + 1e-9
        better += bytes_moved(problem, part.tolist()) < bytes_moved(problem, start.tolist())
    assert better >= 8


def test_the_papers_refinement_repairs_balance():
    """Without any bytes only the second rule moves ops: from a device above its target to one below."""
    problem = PartitionProblem(tuple(map(str, range(9))), np.ones((9, 2)))
    assert work_of_parts(problem, refine(problem, [0] * 9, 0.01).tolist()).tolist() == [5.0, 4.0]


def test_the_papers_refinement_obeys_memory():
    tensors = (Tensor(0, (1,), 8.0),)
    memory = {"memory_bytes": np.full(4, 10.0), "memory_limit_bytes": np.array([20.0, 20.0])}
    problem = PartitionProblem(tuple("abcd"), np.ones((4, 2)), tensors, **memory)
    assert refine(problem, [0, 1, 0, 1], 0.6).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("start", "package"), [(metis_start, "pymetis"), (mtkahypar_start, "mtkahypar")])
def test_other_partitioners_are_further_starts(start, package):
    problem = random_problem(0, ops=60, parts=3, density=0.05, group=np.arange(60) // 2)
    try:
        part = start(problem, 0.1)
    except MissingDependencyError as error:
        assert str(error).endswith(f"needs {package}: pip install 'hocket[partition]'")  # noqa: PT017
        return
    assert imbalance(problem, part.tolist()) <= 0.5
    assert set(part.tolist()) == {0, 1, 2}
    assert np.all(part[::2] == part[1::2])
    assert bytes_moved(problem, part.tolist()) <= bytes_moved(problem, random_start(problem, 0).tolist())


def test_intervals_have_the_least_largest_load_of_their_order():
    from itertools import combinations_with_replacement

    for seed in range(6):
        problem = random_problem(seed, ops=8, parts=3, ratio=0.3, transfer_price=np.array([1.0, 1.0, 0.5]))
        part = contiguous_start(problem)
        assert part is not None
        possible = [
            loads_us(problem, [0] * one + [1] * (two - one) + [2] * (8 - two)).max()
            for one, two in combinations_with_replacement(range(9), 2)
        ]
        assert loads_us(problem, part.tolist()).max() == pytest.approx(min(possible))


def test_no_intervals_where_none_fit():
    memory = {"memory_bytes": np.array([3.0, 1.0, 3.0, 1.0]), "memory_limit_bytes": np.array([4.0, 4.0])}
    problem = PartitionProblem(tuple("abcd"), np.ones((4, 2)), waits=((0, 2), (2, 1), (1, 3)), **memory)
    assert contiguous_start(problem) is None
    assert contiguous_start(PartitionProblem((), np.ones((0, 2)))) is None


WANTED = Wanted("load", None, acyclic=True)


def load(problem, part):
    return float(loads_us(problem, np.asarray(part).tolist()).max())


def varied(seed):
    """Devices of different speed, price and memory, and ops that stay together."""
    draw = np.random.default_rng(seed)
    fields = {}
    if seed % 2:
        fields["transfer_price"] = np.array([1.0, 1.0, 0.0])
    if seed % 3 == 0:
        fields |= {"memory_bytes": np.ones(7), "memory_limit_bytes": np.array([3.0, 4.0, 2.0])}
    if seed % 4 == 0:
        fields["group"] = np.array([0, 1, 1, 2, 3, 3, 4], np.int32)
    problem = random_problem(seed, ops=7, parts=3, ratio=0.5, density=draw.uniform(0.2, 0.6), **fields)
    problem.duration_us[:, 2] *= draw.choice([1.0, 3.0])
    return problem


@pytest.mark.parametrize("seed", range(24))
def test_it_is_the_best_of_all_partitions_without_a_cycle(seed):
    problem = varied(seed)
    found = ideal_start(problem)
    able = list(all_partitions(problem, WANTED))
    assert (found is None) == (not able)
    if found is not None:
        assert keeps_limits(problem, WANTED, found)
        assert load(problem, found) == pytest.approx(min(load(problem, part) for part in able))
        assert ideal_start(problem, 0.999 * load(problem, found)) is None


def test_ops_that_take_no_time_are_partitioned():
    names = ("a", "b", "c", "d")
    problem = PartitionProblem(names, np.zeros((4, 2)), (), ((0, 1), (1, 2), (2, 3)))
    assert ideal_start(problem, 0.0) is None
    assert partitioned(problem, objective="load", acyclic=True, budget_s=0.1).loads_us == (0, 0)


def test_too_many_ideals_are_left_to_other_starts(monkeypatch):
    problem = varied(1)
    monkeypatch.setattr(contiguous, "MAX_IDEALS", 5)
    assert ideal_start(problem) is None
    monkeypatch.setattr(contiguous, "MAX_IDEALS", 10_000)
    monkeypatch.setattr(contiguous, "MAX_LOADS", 10)
    assert ideal_start(problem) is None
