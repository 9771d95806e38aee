"""The search against all partitions of small graphs, and against a computation from scratch."""

import numpy as np
import pytest
from tests.planning.partition.cases import all_partitions, random_problem

from hocket.errors import InputError
from hocket.planning.partition import PartitionProblem, Tensor, compiled, partitioned
from hocket.planning.partition.evaluation import bytes_moved, loads_us, part_cycle, pipeline_us
from hocket.planning.partition.search import Wanted, keeps_limits
from support.refusals import refused

EPSILONS = (0.0, 0.03, 0.1, 0.4)


@pytest.mark.parametrize("acyclic", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_balance_is_kept_whenever_any_partition_could(parts, acyclic):
    """Small graphs of few large ops, where most balances exist barely or not at all."""
    met = set()
    for seed in range(16):
        problem = random_problem(seed, ops=6 + seed % 3, parts=parts)
        wanted = Wanted("cut", EPSILONS[seed % 4], acyclic=acyclic)
        possible = list(all_partitions(problem, wanted))
        met.add(bool(possible))
        options = {"epsilon": wanted.epsilon, "acyclic": acyclic, "rounds": 30, "seed": seed, "peers": False}
        if not possible:
            refused(r"no partition of \d ops into \d parts is within", partitioned, problem, **options)
            continue
        found = partitioned(problem, **options)
        assert keeps_limits(problem, wanted, np.array(found.part))
        least = min(bytes_moved(problem, part) for part in possible)
        assert found.bytes_moved == pytest.approx(least), (seed, found.part)
    assert met == {True, False}


@pytest.mark.parametrize(("objective", "acyclic"), [("load", False), ("load", True), ("pipeline", True)])
def test_the_best_of_small_graphs_is_found(objective, acyclic):
    for seed in range(8):
        problem = random_problem(100 + seed, ops=7, parts=3, ratio=0.5)
        found = partitioned(problem, objective=objective, acyclic=acyclic, micro_batches=4, rounds=30, seed=seed)

        def cost(part, problem=problem):
            return pipeline_us(problem, part, 4) if objective == "pipeline" else loads_us(problem, part).max()

        least = min(cost(part) for part in all_partitions(problem, Wanted(objective, None, acyclic=acyclic)))
        assert cost(found.part) == pytest.approx(least)
        assert not acyclic or found.cycle is None


def test_random_ops_in_program_order_make_no_cycle():
    """Orders without data, as between ops that draw random numbers, count as much as data."""
    waits = [(op, op + 1) for op in range(0, 18, 2)] + [(op, op + 2) for op in range(0, 18, 2)]
    tensors = tuple(Tensor(op, (op + 1,), 100.0) for op in range(0, 18, 2))
    problem = PartitionProblem(tuple(map(str, range(20))), np.ones((20, 4)), tensors, waits)
    found = partitioned(problem, epsilon=0.2, acyclic=True, rounds=20)
    assert found.cycle is None
    assert found.bytes_moved == 0.0
    assert part_cycle(problem, [op % 2 for op in range(20)]) is None
    assert part_cycle(problem, [op // 2 % 2 for op in range(20)]) == (0, 1)


def test_a_disconnected_graph_is_cut_for_nothing():
    tensors = tuple(Tensor(op, (op + 1,), 8.0) for op in range(0, 8, 2))
    problem = PartitionProblem(tuple(map(str, range(8))), np.ones((8, 2)), tensors)
    assert partitioned(problem, rounds=5).bytes_moved == 0.0


def test_memory_is_a_limit():
    """Balance alone would allow two large ops on one device."""
    memory = np.array([60.0, 1.0, 60.0, 1.0, 1.0, 1.0])
    tensors = (Tensor(0, (2,), 1e6), Tensor(1, (3,), 1.0))
    problem = PartitionProblem(
        tuple("abcdef"), np.ones((6, 2)), tensors, memory_bytes=memory, memory_limit_bytes=np.array([100.0, 100.0])
    )
    for objective in ("cut", "load", "pipeline", "time"):
        part = partitioned(problem, objective=objective, micro_batches=2, rounds=10).part
        assert part[0] != part[2], objective


def test_no_placement_that_fits_the_memory_is_an_error():
    fields = {"memory_bytes": np.full(3, 60.0), "memory_limit_bytes": np.array([100.0, 100.0])}
    problem = PartitionProblem(tuple("abc"), np.ones((3, 2)), **fields)
    refused(
        r"no partition of 3 ops into 2 parts fits the devices' memory \(all were ruled out",
        partitioned,
        problem,
        objective="load",
        rounds=5,
    )


def test_an_op_larger_than_a_part_is_named():
    problem = PartitionProblem(("small", "huge"), np.array([[1.0, 1.0], [50.0, 50.0]]))
    refused("op 'huge' and what stays with it take 50 us, and the largest target is 26 us", partitioned, problem)


def test_groups_stay_together_and_passes_may_both_be_crossed():
    """A chain of four layers forward and back, each with its gradient."""
    waits = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    tensors = tuple(Tensor(src, (dst,), 1.0) for src, dst in waits)
    problem = PartitionProblem(
        tuple(map(str, range(8))),
        np.ones((8, 2)),
        tensors,
        waits,
        group=np.array([0, 1, 2, 3, 3, 2, 1, 0]),
        backward=np.arange(8) >= 4,
    )
    found = partitioned(problem, acyclic=True, rounds=20)
    assert found.part[:4] == found.part[:3:-1]
    assert found.bytes_moved == 2.0
    assert found.cycle is None


def test_parts_are_as_large_as_devices_are_fast():
    takes_us = np.ones((40, 2)) * [1.0, 3.0]
    found = partitioned(PartitionProblem(tuple(map(str, range(40))), takes_us), epsilon=0.05, rounds=5)
    assert found.part.count(0) == 30


def test_one_side_of_the_balance_alone():
    problem = PartitionProblem(tuple("abcde"), np.ones((5, 3)), (Tensor(0, (1,), 5.0),))
    refused("no partition of 5 ops", partitioned, problem, epsilon=0.2, rounds=5)
    assert partitioned(problem, epsilon=0.2, two_sided=False, rounds=5).bytes_moved == 0.0


def test_the_same_seed_gives_the_same_partition():
    problem = random_problem(7, ops=40, parts=4, density=0.1)
    options = {"epsilon": 0.1, "rounds": 12, "budget_s": 60.0}
    assert partitioned(problem, seed=3, **options).part == partitioned(problem, seed=3, **options).part


def test_what_the_search_keeps_up_to_date_is_what_a_partition_costs():
    from hocket.planning.partition.search import Hypergraph

    for seed in range(6):
        problem = random_problem(seed, ops=30, parts=4, density=0.15)
        part = np.random.default_rng(seed).integers(0, 4, 30).astype(np.int32)
        for objective in ("cut", "load", "pipeline"):
            wanted = Wanted(objective, 0.2, micro_batches=6)
            for rounds in (0, 6):
                found, violation, cost, _ = Hypergraph(problem, wanted).search([part], seed, rounds, 10.0)
                expected = {
                    "cut": bytes_moved(problem, found.tolist()),
                    "load": loads_us(problem, found.tolist()).max(),
                    "pipeline": pipeline_us(problem, found.tolist(), 6),
                }
                assert cost == pytest.approx(expected[objective])
                assert (violation < 1e-6) == keeps_limits(problem, wanted, found)


def test_without_a_compiler_the_papers_heuristics_are_left(monkeypatch):
    monkeypatch.setattr(compiled, "why_not", lambda: "no compiler")
    problem = random_problem(3, ops=60, parts=3, density=0.05)
    found = partitioned(problem, epsilon=0.15, peers=False)
    assert found.imbalance <= 0.15
    refused(r"none was found.*no compiler", partitioned, problem, epsilon=0.0, peers=False)
    refused("the objective time has no other search: no compiler", partitioned, problem, objective="time")


@pytest.mark.slow
def test_a_large_graph_is_partitioned():
    draw = np.random.default_rng(0)
    ops = 100_000
    readers: dict[int, list[int]] = {}
    for op in range(1, ops):
        readers.setdefault(max(0, op - int(draw.integers(1, 6))), []).append(op)
    tensors = tuple(
        Tensor(source, tuple(found), 4.0 * int(draw.integers(1, 1000))) for source, found in readers.items()
    )
    takes_us = np.repeat(draw.uniform(1, 20, ops)[:, None], 8, 1)
    problem = PartitionProblem(tuple(map(str, range(ops))), takes_us, tensors)
    found = partitioned(problem, budget_s=6.0)
    assert found.imbalance <= 0.03 + 1e-6
    assert found.bytes_moved <= 0.8 * partitioned(problem, budget_s=0.01, rounds=0).bytes_moved


def test_ops_that_wait_for_each_other_in_a_circle_prove_that_nothing_is_balanced():
    # a and c stay together, and b is between them: all three are on one device, whatever the search tries.
    takes = np.repeat(np.array([[1.0], [5.0], [1.0], [1.0]]), 2, 1)
    problem = PartitionProblem(("a", "b", "c", "d"), takes, waits=((0, 1), (1, 2)), group=np.array([0, 1, 0, 2]))
    with pytest.raises(InputError, match=r"3 ops, op 'a' among them, wait for each other in a circle .* take 7 us"):
        partitioned(problem, acyclic=True, epsilon=0.5, rounds=5)
    assert partitioned(problem, epsilon=0.5, two_sided=False, rounds=5).imbalance <= 0.5
