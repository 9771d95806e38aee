"""`Planner`, the base class of all planners, and the devices that they plan for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Plan
from hocket.planning.channels import first_use, plan_around, transfers_of


class Planner(ABC):
    """Base class of planners. The options of a planner are the arguments of its constructor.

    Attributes:
        name: its name for `hocket.plan` and the command line.
        automatic: True if ``planner="auto"`` tries it. Planners that may take long are left out.
    """

    name: ClassVar[str]
    automatic: ClassVar[bool] = True

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        """Make a legal plan of `graph` on `machine` with a short makespan by `costs`.

        Transfers (`hocket.planning.channels.transfers_of`) go over channels, by default in the order of their first
        use. The other ops are planned for their earliest starts.

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
        """Make a legal plan of a graph without transfers.

        Args:
            graph: one step without transfers.
            costs: the durations of its ops.
            machine: its devices.
            earliest_us: the earliest start of each op that waits for an arrival. It never falls along an edge.

        Raises:
            InputError: as `plan`.
        """

    def urgency(self, graph: Graph, transfers: Sequence[str]) -> Mapping[str, float]:
        """The urgency of each transfer. Of those that are ready the one with the lowest number goes first."""
        return first_use(graph, transfers)


def misplaced(plan: Plan, costs: Costs) -> tuple[str, int] | None:
    """The first op of a plan that may not run at its lane's width (`Costs.only_listed`), and that width."""
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
    """The first GPU under whose name every op of a graph without transfers has a duration, or None."""
    for device in machine.devices:
        if device.kind == "cuda" and len(graph):
            keys = {device.name, f"{device.name}:1"}
            if all(op.name in costs and not keys.isdisjoint(costs.durations_us[op.name]) for op in graph.ops):
                return device
    return None
