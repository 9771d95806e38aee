"""`serial`: one op after another at the full width of the device, as eager PyTorch runs them."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Plan, one_by_one
from hocket.planning.base import Planner, cpu_devices
from hocket.planning.channels import by_earliest


class Serial(Planner):
    """One lane on the first CPU device, in `Graph.order`, or by earliest start if ops wait for arrivals.

    Args:
        width: its threads, by default all cores of the device. Ops that may not run at this width
            (`Costs.only_listed`) take the nearest one, on a lane of their own.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> print(Serial().plan(Graph((Op("a"), Op("b"))), Costs({}), Machine.of(cores=2)), end="")
        hocket-plan/1 planner=serial
        lane cpu0 kind=cores device=cpu0 width=2 cores=0,1
        run a
        run b
    """

    name = "serial"

    def __init__(self, width: int | None = None) -> None:
        self.require_whole(width=width)
        self.width = width

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        device = cpu_devices(machine)[0]
        width = self.width or device.cores
        if width > device.cores:
            raise InputError(f"planner serial: width {width}, but {device.name!r} has {device.cores} cores")
        order = by_earliest(graph, earliest_us)
        return one_by_one(graph, order, {op: costs.nearest_width(op, width) for op in order}, device)
