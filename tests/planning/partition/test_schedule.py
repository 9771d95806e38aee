"""The objective `time` against the optimum: of CP-SAT, and of branch and bound, which is compared with CP-SAT first."""

from statistics import fmean

import numpy as np
import pytest
from tests.planning.partition.cases import random_problem

from hocket.planning.partition import PartitionProblem, Tensor, partitioned
from hocket.planning.partition.evaluation import simulated_us
from hocket.planning.partition.partitioned import schedule

RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0)


def optimum_us(problem: PartitionProblem, limit_s: float = 20.0) -> tuple[float, bool]:
    """The earliest end by constraint programming, in thousandths, and whether that is proved."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    scale, devices, ops = 1000, range(problem.num_parts), range(len(problem))
    takes = [round(scale * float(problem.duration_us[op, 0])) for op in ops]
    delays = {(t.source, r): round(scale * t.transfer_us) for t in problem.tensors for r in t.readers}
    horizon = sum(takes)
    on = [[model.new_bool_var(f"op{op}on{d}") for d in devices] for op in ops]
    start = [model.new_int_var(0, horizon, f"start{op}") for op in ops]
    for d in devices:
        model.add_no_overlap(
            [
                model.new_optional_interval_var(start[o], takes[o], start[o] + takes[o], on[o][d], f"i{o}{d}")
                for o in ops
            ]
        )
    for op in ops:
        model.add_exactly_one(on[op])
    for (src, dst), delay in delays.items():
        apart = model.new_bool_var(f"apart{src}-{dst}")
        for d in devices:
            model.add_implication(on[src][d], on[dst][d]).only_enforce_if(apart.negated())
        model.add(start[dst] >= start[src] + takes[src])
        model.add(start[dst] >= start[src] + takes[src] + delay).only_enforce_if(apart)
    end = model.new_int_var(0, horizon, "end")
    for op in ops:
        model.add(end >= start[op] + takes[op])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return solver.objective_value / scale, status == cp_model.OPTIMAL


def over_best(seeds: range, most_ops: int) -> dict[float, float]:
    """At each ratio the mean of what annealing alone takes over the proved optimum."""
    means = {}
    for ratio in RATIOS:
        found = []
        for seed in seeds:
            draw = np.random.default_rng(seed)
            shape = {"ops": int(draw.integers(3, most_ops + 1)), "parts": int(draw.choice([2, 3, 4, 8, 16]))}
            problem = random_problem(seed, **shape, density=float(draw.uniform(0.15, 0.5)), ratio=ratio)
            part, order, _ = schedule(problem, proof_ops=0)
            best = partitioned(problem, objective="time")
            assert best.proved, (seed, ratio)
            found.append(simulated_us(problem, part.tolist(), order) / best.simulated_us)
        assert min(found) >= 1 - 1e-9
        means[ratio] = fmean(found)
    return means


@pytest.mark.parametrize("ratio", [pytest.param(0.3, marks=pytest.mark.slow), 3.0])
def test_branch_and_bound_proves_what_constraint_programming_proves(ratio):
    for seed in range(3):
        problem = random_problem(seed, ops=5, parts=2 + seed % 2, density=0.3, ratio=ratio)
        best_us, proved = optimum_us(problem)
        found = partitioned(problem, objective="time")
        assert proved
        assert found.proved
        assert found.simulated_us == pytest.approx(best_us, abs=0.02)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(1000), marks=pytest.mark.slow)])
def test_small_graphs_end_as_early_as_they_can(seeds):
    means = over_best(seeds, 12)
    print(means)
    assert all(mean <= 1.03 for mean in means.values())


@pytest.mark.slow
def test_larger_graphs_end_almost_as_early_as_they_can():
    """Graphs of 10 to 30 ops, against the best schedule and bound of twenty seconds of constraint programming."""
    ratios = []
    for seed in range(10):
        problem = random_problem(seed, ops=10 + 2 * seed, parts=3, density=0.2, ratio=RATIOS[seed % 5])
        best_us, _ = optimum_us(problem)
        ratios.append(partitioned(problem, objective="time").simulated_us / best_us)
    print(ratios)
    assert fmean(ratios) <= 1.05


def test_ops_of_a_group_share_a_device():
    problem = random_problem(1, ops=12, parts=3, ratio=0.1, group=np.arange(12) % 4)
    part = partitioned(problem, objective="time").part
    assert all(part[op] == part[op % 4] for op in range(12))


def test_a_chain_stays_and_branches_part():
    tensors = (Tensor(0, (1, 2), 8.0, 1.0), Tensor(1, (3,), 8.0, 1.0), Tensor(2, (3,), 8.0, 1.0))
    problem = PartitionProblem(tuple("abcd"), np.full((4, 2), 10.0), tensors, ((0, 1), (0, 2), (1, 3), (2, 3)))
    found = partitioned(problem, objective="time")
    assert found.proved
    assert found.simulated_us == 31.0
    assert len(set(found.part)) == 2
    assert partitioned(PartitionProblem((), np.ones((0, 2))), objective="time").simulated_us == 0.0
