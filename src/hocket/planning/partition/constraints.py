"""Whether any acyclic partition keeps the balance, decided by constraint programming (CP-SAT of OR-Tools).

For graphs of which there are too many ideals to list (`ideals.py`): parts are numbered so that each waits only for
those of smaller numbers, so no op has a smaller number than one that it waits for. With y(g, j) = "group g is in one of
the parts 0 to j", waits are implications, and the work of part j is linear::

    y(g, j) -> y(g, j + 1)      g waits for h: y(g, j) -> y(h, j)      low <= sum w(g) (y(g, j) - y(g, j - 1)) <= high

Where groups hold ops of both passes, parts may wait for each other in one order in the forward pass and in another in
the backward pass. Numbers are those of the forward pass then, and b(p, q) = "part p comes before q" the other order::

    g waits for h:  h in p and g in q -> b(p, q)        b(p, q) or b(q, p), not both        b(p, q), b(q, r) -> b(p, r)

Work is rounded to whole numbers and the limits are widened by what that can add up to: what is impossible then is
impossible; what is found is for the caller to look at.
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
# Above so many variables and clauses the model alone takes seconds.
MAX_VARIABLES = 100_000


def acyclic_by_constraints(
    problem: PartitionProblem, low: NDArray[np.float64], high: NDArray[np.float64], budget_s: float
) -> tuple[bool | None, NDArray[np.int32] | None]:
    """Whether there is an acyclic partition within limits, and one if there is.

    Args:
        problem: whose devices are alike; others are not decided.
        low: the least work of each part.
        high: the most work of each part.
        budget_s: seconds to search for.

    Returns:
        True and the part of each op, which keeps the limits but for rounding; False; or None: not decided, or OR-Tools
        is not installed.

    Example:
        >>> problem = PartitionProblem(("a", "b"), np.array([[1.0, 1.0], [3.0, 3.0]]), waits=((0, 1),))
        >>> acyclic_by_constraints(problem, np.zeros(2), np.full(2, 2.5), 5.0)
        (False, None)
    """
    alike = all(len(set(values.tolist())) == 1 for values in (low, high, problem.memory_limit_bytes))
    if not alike or importlib.util.find_spec("ortools") is None:
        return None, None
    count, parts = problem.num_groups, problem.num_parts
    onward, backward = _waits(problem)
    if parts < 2 or count * parts + len(backward) * parts**2 > MAX_VARIABLES:
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
    if backward:
        _order_backward(model, within, backward, parts)
    bounded = [(problem.work_us, float(low[0]), float(high[0]))]
    if problem.memory_bytes.sum() > problem.memory_limit_bytes[0]:
        bounded.append((problem.memory_bytes, 0.0, float(problem.memory_limit_bytes[0])))
    for values, least, most in bounded:
        of_group = problem.by_group(values)
        unit = of_group.sum() / UNITS
        sizes = np.rint(of_group / unit).astype(np.int64).tolist()
        rounding = count / 2 + 1
        sums: list[Any] = [0]
        sums += [cp_model.LinearExpr.weighted_sum([y[j] for y in within], sizes) for j in range(parts - 1)]
        sums.append(sum(sizes))
        for before, after in pairwise(sums):
            model.add(after - before >= math.floor(least / unit - rounding))
            model.add(after - before <= math.ceil(most / unit + rounding))
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


def _waits(problem: PartitionProblem) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Groups of which the second waits for the first, by the ops' pass; all in one, where groups hold one pass."""
    found: tuple[dict[tuple[int, int], None], dict[tuple[int, int], None]] = ({}, {})
    group, is_backward, mixed = problem.group.tolist(), problem.backward.tolist(), problem.two_passes
    for source, reader in problem.waits:
        pair = (group[source], group[reader])
        if pair[0] != pair[1] and not (mixed and is_backward[source] != is_backward[reader]):
            found[int(mixed and is_backward[source])][pair] = None
    return list(found[0]), list(found[1])


def _order_backward(model: Any, within: list[list[Any]], waits: list[tuple[int, int]], parts: int) -> None:
    """Some order of the parts in which each waits only for those before it, in the backward pass."""
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
