"""Whether any acyclic partition keeps the balance, decided by constraint programming (CP-SAT of OR-Tools).

For graphs of which there are too many ideals to list (`ideals.py`): parts are numbered so that each waits only for
those of smaller numbers, so no op has a smaller number than one that it waits for. With y(g, j) = "group g is in one of
the parts 0 to j", waits are implications, and the work of part j is linear::

    y(g, j) -> y(g, j + 1)      g waits for h: y(g, j) -> y(h, j)      low <= sum w(g) (y(g, j) - y(g, j - 1)) <= high

Work is rounded to whole numbers and the limits are widened by what that can add up to: what is impossible then is
impossible; what is found is for the caller to look at.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.starts import block_order, group_waits

__all__ = ["acyclic_by_constraints"]

# All work, in the whole numbers of the solver.
UNITS = 10**7
# Above so many groups times parts the model alone takes seconds.
MAX_VARIABLES = 20_000


def acyclic_by_constraints(
    problem: PartitionProblem, low: NDArray[np.float64], high: NDArray[np.float64], budget_s: float
) -> tuple[bool | None, NDArray[np.int32] | None]:
    """Whether there is an acyclic partition within limits, and one if there is.

    Args:
        problem: whose groups hold no ops of both passes, and whose devices are alike; others are not decided.
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
    if problem.two_passes or not alike or importlib.util.find_spec("ortools") is None:
        return None, None
    # Groups that wait for each other in a circle share a part.
    component = np.asarray(block_order(problem)[0])
    count, parts = int(component.max()) + 1, problem.num_parts
    if parts < 2 or count * parts > MAX_VARIABLES:
        return None, None
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    within = [[model.new_bool_var("") for _ in range(parts - 1)] for _ in range(count)]
    for variables in within:
        for here, onward in pairwise(variables):
            model.add_implication(here, onward)
    for source, reader in {(int(component[a]), int(component[b])) for a, b in group_waits(problem)}:
        for here, before in zip(within[reader], within[source], strict=True) if source != reader else ():
            model.add_implication(here, before)
    bounded = [(problem.work_us, float(low[0]), float(high[0]))]
    if problem.memory_bytes.sum() > problem.memory_limit_bytes[0]:
        bounded.append((problem.memory_bytes, 0.0, float(problem.memory_limit_bytes[0])))
    for values, least, most in bounded:
        of_group = np.bincount(component, problem.by_group(values), count)
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
    return True, part[component][problem.group]
