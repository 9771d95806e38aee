"""Decide whether any partition keeps balance, memory and acyclicity, by constraint programming (CP-SAT of OR-Tools).

With y(g, j) = "group g is in one of the parts 0 to j", the work of part j is linear::

    y(g, j) -> y(g, j + 1)                            low(j) <= sum w(g) (y(g, j) - y(g, j - 1)) <= high(j)

Acyclic parts of equal devices can be numbered so that each waits only for parts of smaller numbers. Then waits are
implications: if g waits for h, y(g, j) -> y(h, j). Where devices differ, their numbers are given and the order of the
parts is another variable, b(p, q) = "part p comes before q"::

    g waits for h:  h in p and g in q -> b(p, q)        b(p, q) or b(q, p), not both        b(p, q), b(q, r) -> b(p, r)

The backward pass has such an order of its own where groups hold ops of both passes.

Work is rounded to whole numbers and the limits are widened by the largest sum of the roundings. Infeasible is therefore
proved, while the caller has to check a partition that is found.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem

# All work, in the whole numbers of the solver.
UNITS = 10**7
# Variables and clauses above which building the model alone takes seconds.
MAX_VARIABLES = 100_000


def partition_within(
    problem: PartitionProblem, low: NDArray[np.float64], high: NDArray[np.float64], budget_s: float, *, acyclic: bool
) -> tuple[bool | None, NDArray[np.int32] | None]:
    """Decide whether a partition within limits exists, and return one if there is.

    The limits are the least and the most work of each part, and its memory. The answer is True and the part of each op
    (the limits are kept but for rounding), False, or None if it was not decided or OR-Tools is not installed.
    """
    if importlib.util.find_spec("ortools") is None:
        return None, None
    count, parts = problem.num_groups, problem.num_parts
    room = problem.memory_limit_bytes
    onward, backward = problem.waits_by_pass if acyclic else ([], [])
    ordered = [backward]
    if any(len(set(values.tolist())) > 1 for values in (low, high, room)):
        ordered, onward = [onward, backward], []
    if count * parts + sum(map(len, ordered)) * parts**2 > MAX_VARIABLES:
        return None, None
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    within = [[model.new_bool_var("") for _ in range(parts - 1)] for _ in range(count)]
    for variables in within:
        for smaller, larger in pairwise(variables):
            model.add_implication(smaller, larger)
    for source, reader in onward:
        for here, before in zip(within[reader], within[source], strict=True):
            model.add_implication(here, before)
    for waits in filter(None, ordered):
        _order_parts(model, within, waits, parts)
    for values, least, most in ((problem.work_us, low, high), (problem.memory_bytes, np.zeros(parts), room)):
        of_group = problem.by_group(values)
        unit = max(of_group.sum(), 1e-300) / UNITS
        sizes = np.rint(of_group / unit).astype(np.int64).tolist()
        rounding = count / 2 + 1
        sums: list[Any] = [0]
        sums += [cp_model.LinearExpr.weighted_sum([y[j] for y in within], sizes) for j in range(parts - 1)]
        sums.append(sum(sizes))
        for (before, after), smallest, largest in zip(pairwise(sums), least.tolist(), most.tolist(), strict=True):
            if smallest > 0:
                model.add(after - before >= math.floor(smallest / unit - rounding))
            if largest < of_group.sum():
                model.add(after - before <= math.ceil(largest / unit + rounding))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = 1  # as everything else here: one core, and the same result each time
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return False, None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, None
    part = np.array([sum(not solver.value(y) for y in variables) for variables in within], np.int32)
    return True, part[problem.group]


def _order_parts(model: Any, within: list[list[Any]], waits: list[tuple[int, int]], parts: int) -> None:
    """Require an order of the parts in which each waits only for those before it."""
    before: dict[tuple[int, int], Any] = {}
    for one, other in combinations(range(parts), 2):
        before[one, other] = model.new_bool_var("")
        before[other, one] = before[one, other].negated()
    for one, other, third in permutations(range(parts), 3):
        model.add_bool_or(before[one, other].negated(), before[other, third].negated(), before[one, third])

    def not_in(group: int, part: int) -> list[Any]:
        """Literals of which one is true if the group is in another part."""
        found = [within[group][part].negated()] if part < parts - 1 else []
        return [*found, within[group][part - 1]] if part else found

    for source, reader in waits:
        for one, other in permutations(range(parts), 2):
            model.add_bool_or(*not_in(source, one), *not_in(reader, other), before[one, other])
