"""What every planner is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Plan
from hocket.planning.arrivals import first_use, plan_around
from hocket.planning.channels import transfers_of


class Planner(ABC):
    """A way to make a plan. Its options are the arguments of its constructor.

    Attributes:
        name: what `hocket.plan` and the command line call it.
        automatic: whether ``planner="auto"`` tries it; not one that may take long.
    """

    name: ClassVar[str]
    automatic: ClassVar[bool] = True

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        """A legal plan of `graph` on `machine`, short by what `costs` says.

        Transfers (`hocket.planning.channels.transfers_of`) go over channels, by default in the order of their first
        use; the other ops are planned for when they can start at the earliest.

        Raises:
            InputError: an op without a cost, or a machine without the devices or links that this planner plans for.
        """
        transfers = transfers_of(graph, costs, machine)
        if not transfers:
            return self.compute_plan(graph, costs, machine, {})
        return plan_around(graph, transfers, costs, machine, self.urgency(graph, transfers), self.compute_plan)

    @classmethod
    def require_whole(cls, **options: int | None) -> None:
        """Raise an `InputError` for an option that is no whole number >= 1. None is left out."""
        for option, value in options.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"planner {cls.name}: expected {option} to be a whole number >= 1, got {value!r}")

    @classmethod
    def require_finite(cls, **options: float | None) -> None:
        """Raise an `InputError` for an option that is negative, infinite or NaN. None is left out."""
        for option, value in options.items():
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"planner {cls.name}: expected {option} >= 0, got {value!r}")

    @abstractmethod
    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        """A legal plan of a graph without transfers.

        Args:
            graph: one step, without what goes over links.
            costs: what its ops take.
            machine: what they run on.
            earliest_us: for each op that waits for an arrival when it can start at the earliest. It never falls along
                an edge.

        Raises:
            InputError: as `plan`.
        """

    def urgency(self, graph: Graph, transfers: Sequence[str]) -> Mapping[str, float]:
        """How urgent each transfer is; of those that are ready the one with the lowest number goes first."""
        return first_use(graph, transfers)


def misplaced(plan: Plan, costs: Costs) -> tuple[str, int] | None:
    """The first op of a plan that may not run with its lane's threads (`Costs.only_listed`), and how many these are."""
    if not costs.only_listed:
        return None
    placed = ((op, lane.width) for lane in plan.lanes if lane.kind == "cores" for op in lane.ops)
    return next(((op, width) for op, width in placed if not costs.allows(op, width)), None)


def cpu_devices(machine: Machine) -> list[Device]:
    """The machine's CPU devices, of which there must be one."""
    found = [device for device in machine.devices if device.kind == "cpu"]
    if not found:
        names = ", ".join(f"{device.name} ({device.kind})" for device in machine.devices)
        raise InputError(f"machine: expected at least one cpu device, got only {names}")
    return found


def gpu_of(graph: Graph, costs: Costs, machine: Machine) -> Device | None:
    """The first GPU for which every op of a graph without transfers has a duration under its name, if there is one."""
    for device in machine.devices:
        if device.kind == "cuda" and len(graph):
            keys = {device.name, f"{device.name}:1"}
            if all(op.name in costs and not keys.isdisjoint(costs.durations_us[op.name]) for op in graph.ops):
                return device
    return None
