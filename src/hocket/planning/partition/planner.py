"""`partition`: one step over several devices of a machine, each op on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Machine, Plan
from hocket.planning.arrivals import by_earliest
from hocket.planning.base import Planner
from hocket.planning.partition.graph_problem import problem_of
from hocket.planning.partition.partitioned import OBJECTIVES, Partition, partitioned


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

    def __init__(
        self,
        objective: str = "time",
        epsilon: float | None = None,
        acyclic: bool = False,
        micro_batches: int = 1,
        budget_s: float = 5.0,
        seed: int = 0,
    ) -> None:
        if objective not in OBJECTIVES:
            raise InputError(f"planner partition: unknown objective {objective!r}; one of {', '.join(OBJECTIVES)}")
        self.objective = objective
        self.epsilon = epsilon
        self.acyclic = acyclic
        self.micro_batches = micro_batches
        self.budget_s = budget_s
        self.seed = seed

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        found = partitioned(
            problem_of(graph, costs, machine),
            objective=self.objective,
            epsilon=self.epsilon,
            acyclic=self.acyclic,
            micro_batches=self.micro_batches,
            budget_s=self.budget_s,
            seed=self.seed,
        )
        return plan_of(found, machine, by_earliest(graph, earliest_us) if earliest_us else None)


def plan_of(found: Partition, machine: Machine, order: Sequence[str] | None = None) -> Plan:
    """A partition as a plan with one lane for each device that has ops, as wide as the device.

    Args:
        found: the partition, whose devices are those of `machine`, in their order.
        machine: its devices.
        order: a topological order that lanes keep, by default the partition's own.
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
