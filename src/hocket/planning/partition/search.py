"""The compiled search from several starts, within a time budget.

Coarsening, refinement and recombination are in ``core/search.cpp``. This file converts the problem to arrays, makes the
starts, and checks the result: if it is not within the limits, `constraints` decides if a partition within them exists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError, MissingDependencyError
from hocket.planning.partition import compiled, starts
from hocket.planning.partition.constraints import partition_within
from hocket.planning.partition.contiguous import contiguous_start, ideal_start
from hocket.planning.partition.evaluation import bytes_moved, imbalance, loads_us, part_cycle, pipeline_us
from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.starts import refine

OBJECTIVES = ("cut", "load", "pipeline")
TOLERANCE = 1e-6
# Where the search finds no partition within the limits, constraint programming may take this many times the budget.
PROOF_SHARE = 4.0
# Ops above which there is one start, to leave time for the search.
LARGE = 20_000


@dataclass(frozen=True)
class Wanted:
    """The objective and the limits of a partition."""

    objective: str = "cut"  # ``cut`` (bytes moved), ``load`` (the most loaded device) or ``pipeline``
    # the largest distance of a part from its target, as a share of the target, None for no limit
    epsilon: float | None = 0.03
    two_sided: bool = True  # False to limit only parts above their target, as other partitioners do
    acyclic: bool = False  # parts may not wait for each other in a circle
    micro_batches: int = 1  # of the objective ``pipeline``


def wanted_for(
    objective: str, epsilon: float | None, two_sided: bool = True, acyclic: bool = False, micro_batches: int = 1
) -> Wanted:
    """The options of `partitioned`, with the default of `epsilon`, and no circle in a pipeline."""
    epsilon = 0.03 if epsilon is None and objective == "cut" else epsilon
    return Wanted(objective, epsilon, two_sided, acyclic or objective == "pipeline", micro_batches)


def search(
    problem: PartitionProblem, wanted: Wanted, *, budget_s: float, rounds: int, seed: int, peers: bool
) -> tuple[NDArray[np.int32], int | None]:
    """The part of each op, and the number of rounds after which the budget ended the search, None if it did not.

    Raises:
        InputError: no partition that keeps the limits exists, or none was found (the message says which).
    """
    begin_s = perf_counter()
    given = _starts(problem, wanted, seed, peers)
    if compiled.why_not():
        return _without_compiler(problem, wanted, given), None
    hypergraph = Hypergraph(problem, wanted)
    # The search has the time that is left, and at least a fifth of the budget.
    budget_s = max(0.2 * budget_s, budget_s - (perf_counter() - begin_s))
    part, violation, _, num_rounds = hypergraph.search(given, seed, rounds, budget_s)
    if violation > TOLERANCE:
        _refuse_circles(problem, wanted)
        low, high = limits(problem, wanted)
        slack = TOLERANCE / 2 * problem.work_us.sum()
        exists, example = partition_within(
            problem, low - slack, high + slack, PROOF_SHARE * budget_s, acyclic=wanted.acyclic
        )
        if example is None or not keeps_limits(problem, wanted, example):
            raise InputError(_refusal(problem, wanted, part, proved=exists is False))
        part, violation, _, num_rounds = hypergraph.search([example, *given], seed, rounds, budget_s)
    return part, num_rounds if num_rounds < rounds else None


def _starts(problem: PartitionProblem, wanted: Wanted, seed: int, peers: bool) -> list[NDArray[np.int32]]:
    # For 100,000 ops, a topological order in Python takes a second, and Mt-KaHyPar the whole budget.
    small = len(problem) <= LARGE
    again = range(4 if small else 0)
    found = [starts.block_start(problem), *(starts.block_start(problem, seed + number) for number in again)]
    if wanted.objective != "cut":
        intervals = (contiguous_start(problem, None if number == 0 else seed + number) for number in again)
        found += [part for part in intervals if part is not None]
        if wanted.acyclic:
            able = [part for part in found if keeps_limits(problem, wanted, part)]
            most_us = min((float(loads_us(problem, part.tolist()).max()) for part in able), default=np.inf)
            if (best := ideal_start(problem, most_us)) is not None:
                found.append(best)
    if wanted.acyclic:
        return found
    found.append(starts.random_start(problem, seed))
    if wanted.epsilon is not None and small:
        found.append(refine(problem, found[0].tolist(), wanted.epsilon))
        makers: tuple[Callable[..., NDArray[np.int32]], ...] = (starts.metis_start, starts.mtkahypar_start)
        for maker in makers if peers else ():
            try:
                found.append(maker(problem, wanted.epsilon, seed))
            except MissingDependencyError:
                continue  # an optional further start
    return found


def _without_compiler(
    problem: PartitionProblem, wanted: Wanted, given: Sequence[NDArray[np.int32]]
) -> NDArray[np.int32]:
    """The best start: the paper's refinement is among them."""

    def cost(part: NDArray[np.int32]) -> float:
        if wanted.objective == "cut":
            return bytes_moved(problem, part.tolist())
        if wanted.objective == "pipeline":
            return pipeline_us(problem, part.tolist(), wanted.micro_batches)
        return float(loads_us(problem, part.tolist()).max())

    able = [part for part in given if keeps_limits(problem, wanted, part)]
    if not able:
        raise InputError(f"{_refusal(problem, wanted, given[0], proved=False)}; {compiled.why_not()}")
    return min(able, key=cost)


def keeps_limits(problem: PartitionProblem, wanted: Wanted, part: NDArray[np.int32]) -> bool:
    """Return True if a partition keeps balance and memory and, if wanted, has no cycle."""
    work = np.bincount(part, problem.work_us, problem.num_parts)
    low, high = limits(problem, wanted)
    slack = TOLERANCE * max(work.sum(), 1e-300)
    held = np.bincount(part, problem.memory_bytes, problem.num_parts)
    return bool(
        np.all(work <= high + slack)
        and np.all(work >= low - slack)
        and np.all(held <= problem.memory_limit_bytes * (1 + TOLERANCE))
        and not (wanted.acyclic and part_cycle(problem, part.tolist()))
    )


def limits(problem: PartitionProblem, wanted: Wanted) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the most work of each part."""
    if wanted.epsilon is None:
        return np.full(problem.num_parts, -np.inf), np.full(problem.num_parts, np.inf)
    target = problem.shares * problem.work_us.sum()
    low = target * (1 - wanted.epsilon) if wanted.two_sided else np.zeros(problem.num_parts)
    return low, target * (1 + wanted.epsilon)


def _refusal(problem: PartitionProblem, wanted: Wanted, part: NDArray[np.int32], *, proved: bool) -> str:
    """The reason why there is no partition, in one line."""
    parts = f"{len(problem)} ops into {problem.num_parts} parts"
    work, target = problem.by_group(problem.work_us), problem.shares * problem.work_us.sum()
    heaviest = int(work.argmax())
    if wanted.epsilon is not None and work[heaviest] > target.max() * (1 + wanted.epsilon):
        op = problem.names[int(np.flatnonzero(problem.group == heaviest)[0])]
        return (
            f"partition: no partition of {parts} is within {wanted.epsilon:g} of its targets: op {op!r} and what stays "
            f"with it take {work[heaviest]:,.0f} us, and the largest target is {target.max():,.0f} us"
        )
    kept = [] if wanted.epsilon is None else [f"is within {wanted.epsilon:g} of its targets"]
    kept += ["fits the devices' memory"] if np.isfinite(problem.memory_limit_bytes).any() else []
    kept += ["has no cycle between parts"] if wanted.acyclic else []
    what = " and ".join(kept)
    near = f"the nearest that was found is {imbalance(problem, part.tolist()):.3g} off"
    if proved:
        return f"partition: no partition of {parts} {what} (all were ruled out); {near}"
    return f"partition: none was found of {parts} that {what}; {near}"


def _refuse_circles(problem: PartitionProblem, wanted: Wanted) -> None:
    """Raise an `InputError` if groups on a circle of waits, which share a device in an acyclic partition, are too
    large.

    If groups hold both passes, only waits within a pass count, and this proves nothing.
    """
    if not wanted.acyclic or problem.two_passes:
        return
    component = np.asarray(starts.block_order(problem)[0])
    work = np.bincount(component, problem.by_group(problem.work_us))
    heaviest = int(work.argmax())
    groups = np.flatnonzero(component == heaviest)
    most = limits(problem, wanted)[1].max()
    if len(groups) > 1 and work[heaviest] > most + TOLERANCE * work.sum():
        members = np.flatnonzero(np.isin(problem.group, groups))
        raise InputError(
            f"partition: no partition of {len(problem)} ops into {problem.num_parts} parts without a cycle is within "
            f"{wanted.epsilon:g} of its targets: {len(members)} ops, op {problem.names[members[0]]!r} among them, wait "
            f"for each other in a circle with what stays together, and take {work[heaviest]:,.0f} us; a part may take "
            f"{most:,.0f} us"
        )


class Hypergraph:
    """A problem as arrays for the compiled search, group by group."""

    def __init__(self, problem: PartitionProblem, wanted: Wanted) -> None:
        self.problem = problem
        group = problem.group
        cut = wanted.objective == "cut"
        nets: list[list[int]] = []
        costs: list[float] = []
        numbers = group.tolist()
        for tensor in problem.tensors:
            cost = tensor.size_bytes if cut else tensor.transfer_us
            pins = {numbers[tensor.source], *(numbers[reader] for reader in tensor.readers)}
            if len(pins) > 1 and cost > 0:
                nets.append(sorted(pins))
                costs.append(cost)
        arcs = self._arcs(wanted)
        low, high = limits(problem, wanted)
        # Partitioners that use integers may exceed a limit by rounding.
        rounding = TOLERANCE / 2 * problem.work_us.sum()
        arrays = (
            np.cumsum([0, *map(len, nets)], dtype=np.int32),
            np.fromiter((pin for net in nets for pin in net), np.int32),
            np.asarray(costs, np.float64),
            problem.by_group(problem.work_us),
            problem.by_group(problem.memory_bytes),
            problem.by_group(problem.duration_us),
            *arcs,
            *(low - rounding, high + rounding, problem.memory_limit_bytes * (1 + 1e-12), problem.transfer_price),
        )
        self._arrays = [np.ascontiguousarray(array) for array in arrays]  # they must outlive the pointers
        self._given = compiled.HypergraphArrays(
            problem.num_groups,
            problem.num_parts,
            len(nets),
            len(arcs[0]),
            *(array.ctypes.data for array in self._arrays),
            OBJECTIVES.index(wanted.objective),
            int(wanted.acyclic),
            float(wanted.micro_batches),
        )

    def _arcs(self, wanted: Wanted) -> tuple[NDArray[np.int32], ...]:
        problem = self.problem
        if not wanted.acyclic or not len(problem.waits):
            return tuple(np.zeros(0, np.int32) for _ in range(3))
        pairs = [(*pair, phase) for phase, waits in enumerate(problem.waits_by_pass) for pair in waits]
        rows = np.unique(np.array(pairs, np.int64).reshape(-1, 3), axis=0)
        return tuple(np.ascontiguousarray(rows[:, column], np.int32) for column in range(3))

    def search(
        self, given: Sequence[NDArray[np.int32]], seed: int, rounds: int, budget_s: float
    ) -> tuple[NDArray[np.int32], float, float, int]:
        """The best partition of the ops, its violation of the limits, its cost, and the number of rounds made."""
        rows = np.zeros((len(given), self.problem.num_groups), np.int32)
        rows[:, self.problem.group] = np.stack(given)
        best = np.zeros(self.problem.num_groups, np.int32)
        violation, cost = ctypes.c_double(), ctypes.c_double()
        num_rounds: int = compiled.library().hocket_search(
            *(ctypes.byref(self._given), rows.ctypes.data, len(rows), seed, rounds, budget_s, best.ctypes.data),
            *(ctypes.byref(violation), ctypes.byref(cost)),
        )
        return best[self.problem.group], violation.value, cost.value, num_rounds
