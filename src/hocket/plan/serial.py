"""`serial`: one op after another, as wide as the device; what eager PyTorch does, and the bound that others beat."""

from __future__ import annotations

from hocket.ir import Costs, Graph, Lane, Machine, Plan
from hocket.plan.base import Planner, cpu_devices

__all__ = ["Serial"]


class Serial(Planner):
    """One lane on the first CPU device, on all of its cores, in `Graph.order`.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> print(Serial().plan(Graph((Op("a"), Op("b"))), Costs({}), Machine.of(cores=2)), end="")
        hocket-plan/1 planner=serial
        lane cpu0 kind=cores device=cpu0 width=2 cores=0,1
        run a
        run b
    """

    name = "serial"

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        device = cpu_devices(machine)[0]
        lane = Lane(device.name, graph.order, device=device.name, width=device.cores, cores=tuple(range(device.cores)))
        return Plan((lane,), planner=self.name)
