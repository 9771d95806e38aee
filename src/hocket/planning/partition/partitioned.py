"""`partitioned`: a `Partition` of a problem by one of several objectives.

`partition`: one step over several devices of a machine, each op on one of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Machine, Plan, Span, Timeline
from hocket.planning.base import Planner
from hocket.planning.channels import by_earliest
from hocket.planning.partition import compiled, evaluation
from hocket.planning.partition.graph_problem import problem_of
from hocket.planning.partition.problem import PartitionProblem
from hocket.planning.partition.search import Wanted, search, wanted_for
from hocket.planning.partition.starts import block_start, topological_order

OBJECTIVES = ("cut", "load", "time", "pipeline")
# The most ops, and nodes of the search, with which `time` tries to prove the optimum.
PROOF_OPS = 12
PROOF_NODES = 30_000_000
# The core's clock cannot add longer budgets to a time.
YEAR_S = 365 * 86400


@dataclass(frozen=True)
class Partition:
    """The device of each op, and an order of all ops.

    Attributes:
        problem: ops and devices.
        part: for each op the position of its device.
        order: a topological order in which each device runs its ops.
        objective: one of `OBJECTIVES`.
        proved: True if no other partition is better (`time`, small graphs only).
        ended_after_rounds: rounds after which the budget ended the search: a longer one may find a better partition.
            None if the search has made all its rounds, and for ``time``.
    """

    problem: PartitionProblem
    part: tuple[int, ...]
    order: tuple[int, ...]
    objective: str = "cut"
    proved: bool = False
    ended_after_rounds: int | None = None

    @cached_property
    def bytes_moved(self) -> float:
        return evaluation.bytes_moved(self.problem, self.part)

    @cached_property
    def loads_us(self) -> tuple[float, ...]:
        """For each device the time of its ops and of the tensors that cross its border."""
        return tuple(evaluation.loads_us(self.problem, self.part).tolist())

    @cached_property
    def imbalance(self) -> float:
        """The largest distance of a part's work from its target, as a share of the target."""
        return evaluation.imbalance(self.problem, self.part)

    @cached_property
    def cycle(self) -> tuple[int, ...] | None:
        """Parts that wait for each other in a circle, if there are any."""
        return evaluation.part_cycle(self.problem, self.part)

    @cached_property
    def simulated_us(self) -> float:
        """The end of the step, transfers between devices included."""
        return evaluation.simulated_us(self.problem, self.part, self.order)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, with a lane for each device and transfers as gaps between its ops."""
        problem = self.problem
        spans = evaluation.simulated_spans(problem, self.part, self.order)
        return Timeline(
            tuple(
                Span(problem.names[op], problem.devices[self.part[op]], start_us, end_us)
                for op, (start_us, end_us) in zip(self.order, spans, strict=True)
            ),
            tuple(device for number, device in enumerate(problem.devices) if number in self.part),
            source="simulated",
        )

    @property
    def names_in_order(self) -> tuple[str, ...]:
        """The names of the ops, in `order`."""
        return tuple(self.problem.names[op] for op in self.order)

    @property
    def device_of(self) -> dict[str, str]:
        """The device of each op, by name."""
        problem = self.problem
        return {name: problem.devices[part] for name, part in zip(problem.names, self.part, strict=True)}


def partitioned(
    problem: PartitionProblem,
    *,
    objective: str = "cut",
    epsilon: float | None = None,
    two_sided: bool = True,
    acyclic: bool = False,
    micro_batches: int = 1,
    budget_s: float = 5.0,
    rounds: int = 200,
    seed: int = 0,
    peers: bool = True,
) -> Partition:
    """Partition `problem` over its devices.

    The search ends after `rounds` or `budget_s`, whichever is first. With rounds that fit into the budget the same seed
    gives the same partition.

    Args:
        problem: ops, tensors, devices.
        objective: ``cut`` for the fewest bytes moved, ``load`` for the least load of the most loaded device, ``time``
            for the earliest end, ``pipeline`` for the earliest end of `micro_batches` in a row, without cycles.
        epsilon: the largest distance of a part's work from its target, as a share of the target, which is always kept.
            By default 0.03 for ``cut`` and no limit for the others. Not allowed for ``time``.
        two_sided: False to limit only parts above their target.
        acyclic: parts may not wait for each other in a circle. Always so for ``pipeline``.
        micro_batches: of ``pipeline``.
        budget_s: seconds to search for.
        rounds: cycles of the search.
        seed: of all random numbers.
        peers: also begin with METIS's and Mt-KaHyPar's partitions if these are installed.

    Raises:
        InputError: an unknown objective, an invalid limit, more devices than ops, fewer micro-batches than stages, no
            partition within the limits, or none found (the message says which of the two).

    Example:
        >>> from hocket.planning.partition import Tensor
        >>> chain = tuple(Tensor(op, (op + 1,), 8.0) for op in range(3))
        >>> problem = PartitionProblem(("a", "b", "c", "d"), np.ones((4, 2)), chain)
        >>> partitioned(problem, budget_s=1.0, rounds=5).bytes_moved
        8.0
    """
    if objective not in OBJECTIVES:
        raise InputError(f"partition: unknown objective {objective!r}; one of {', '.join(OBJECTIVES)}")
    if epsilon is not None and not 0 <= epsilon < 1:
        raise InputError(f"partition: expected epsilon in [0, 1), got {epsilon}")
    if not 0 < budget_s < YEAR_S or rounds < 0:
        expected = "a budget > 0 s, less than a year, and rounds >= 0"
        raise InputError(f"partition: expected {expected}, got {budget_s} and {rounds}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"partition: expected seed to be a whole number from 0 to 2^63 - 1, got {seed!r}")
    if objective != "time" and problem.num_parts > len(problem):
        raise InputError(f"partition: {problem.num_parts} devices, and only {len(problem)} ops to place on them")
    if objective == "pipeline" and micro_batches < problem.num_parts:
        raise InputError(
            f"partition: {micro_batches} micro-batches for {problem.num_parts} stages: fewer than one for each stage "
            "leave stages idle all the time"
        )
    if objective == "time":
        if epsilon is not None or acyclic:
            raise InputError("partition: the objective time takes neither epsilon nor acyclic")
        return _earliest(problem, budget_s, rounds, seed)
    wanted = wanted_for(objective, epsilon, two_sided, acyclic, micro_batches)
    part, ended_after_rounds = search(problem, wanted, budget_s=budget_s, rounds=rounds, seed=seed, peers=peers)
    order = topological_order(len(problem), problem.waits)
    return Partition(problem, tuple(part.tolist()), tuple(order), objective, ended_after_rounds=ended_after_rounds)


def _earliest(problem: PartitionProblem, budget_s: float, rounds: int, seed: int) -> Partition:
    if compiled.why_not():
        raise InputError(f"partition: the objective time has no other search: {compiled.why_not()}")
    start: NDArray[np.int32] = block_start(problem)
    if np.isfinite(problem.memory_limit_bytes).any():
        start, _ = search(problem, Wanted("load", None), budget_s=budget_s / 4, rounds=rounds, seed=seed, peers=False)
    part, order, proved = schedule(problem, start=start, budget_s=budget_s, rounds=min(rounds, 12), seed=seed)
    return Partition(problem, tuple(part.tolist()), order, "time", proved)


def schedule(
    problem: PartitionProblem,
    *,
    start: NDArray[np.int32] | None = None,
    budget_s: float = 5.0,
    rounds: int = 12,
    seed: int = 0,
    proof_ops: int = PROOF_OPS,
) -> tuple[NDArray[np.int32], tuple[int, ...], bool]:
    """The device of each op, an order of all ops, and True if it is proved that no schedule is shorter.

    The objective `time`: the earliest end of the step, communication included. A tensor takes its transfer time to
    another device. ``core/schedule.cpp`` searches: annealing in `rounds`, also from the partition `start`, and branch
    and bound, which tries to prove the optimum of up to `proof_ops` ops. An `InputError` says that there is no
    compiler, or that no assignment was found that fits the memory.
    """
    if not len(problem):
        return np.zeros(0, np.int32), (), True
    delays = problem.delays_us
    src = np.fromiter((pair[0] for pair in delays), np.int32)
    dst = np.fromiter((pair[1] for pair in delays), np.int32)
    delay = np.fromiter(delays.values(), np.float64)
    memory = problem.by_group(problem.memory_bytes)
    device, order = np.zeros(len(problem), np.int32), np.zeros(len(problem), np.int32)
    takes_us = ctypes.c_double()
    given = None if start is None else np.ascontiguousarray(start, np.int32)
    proved = compiled.library().hocket_schedule(
        *(len(problem), problem.num_parts, problem.duration_us.ctypes.data, len(delays)),
        *(src.ctypes.data, dst.ctypes.data, delay.ctypes.data, problem.num_groups, problem.group.ctypes.data),
        *(memory.ctypes.data, problem.memory_limit_bytes.ctypes.data),
        *(None if given is None else given.ctypes.data, seed, rounds, budget_s),
        PROOF_NODES if len(problem) <= proof_ops else 0,
        *(device.ctypes.data, order.ctypes.data, ctypes.byref(takes_us)),
    )
    if proved < 0:
        raise InputError(f"partition: no placement of {len(problem)} ops was found that fits the devices' memory")
    return device, tuple(int(op) for op in order), proved == 1


@dataclass(eq=False)
class PartitionPlanner(Planner):
    """One lane for each device, with the ops of its part (Tavarageri et al., "Automatic Model Parallelism").

    Args:
        objective: one of cut, load, time and pipeline (see `partitioned`).
        epsilon: the largest distance of a part's work from its target.
        acyclic: parts may not wait for each other in a circle.
        micro_batches: of the objective ``pipeline``.
        budget_s: seconds to search for.
        seed: of all random numbers.

    Example:
        >>> from hocket.ir import Device, Op
        >>> machine = Machine((Device("cpu0"), Device("cpu1")))
        >>> costs = Costs({"a": {"1": 30.0}, "b": {"1": 30.0}})
        >>> print(PartitionPlanner("load").plan(Graph((Op("a"), Op("b"))), costs, machine), end="")
        hocket-plan/1 planner=partition
        lane cpu0 kind=cores device=cpu0 width=1 cores=0
        run a
        lane cpu1 kind=cores device=cpu1 width=1 cores=0
        run b
    """

    name = "partition"
    automatic = False

    objective: str = "time"
    epsilon: float | None = None
    acyclic: bool = False
    micro_batches: int = 1
    budget_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"planner partition: unknown objective {self.objective!r}; one of {', '.join(OBJECTIVES)}")

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        found = partitioned(problem_of(graph, costs, machine), **vars(self))
        return plan_of(found, machine, by_earliest(graph, earliest_us) if earliest_us else None)


def plan_of(found: Partition, machine: Machine, order: Sequence[str] | None = None) -> Plan:
    """A partition as a plan with one lane for each device of `machine` that has ops, as wide as the device.

    Lanes keep `order`, a topological one, by default the partition's own.
    """
    lanes = []
    device_of = found.device_of
    for device in machine.devices:
        ops = tuple(op for op in order or found.names_in_order if device_of[op] == device.name)
        if device.kind == "cpu":
            lanes.append(Lane(device.name, ops, "cores", device.name, device.cores, tuple(range(device.cores))))
        else:
            lanes.append(Lane(device.name, ops, "stream", device.name))
    return Plan(tuple(lane for lane in lanes if lane.ops), planner=PartitionPlanner.name)
