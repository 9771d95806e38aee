"""What every planner is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Plan

__all__ = ["Planner", "cpu_devices"]


class Planner(ABC):
    """A way to make a plan. Its options are the arguments of its constructor.

    Attributes:
        name: what `hocket.plan` and the command line call it.
        automatic: whether ``planner="auto"`` tries it; not one that may take long.
    """

    name: ClassVar[str]
    automatic: ClassVar[bool] = True

    @abstractmethod
    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        """A legal plan of `graph` on `machine`, short by what `costs` says.

        Raises:
            InputError: an op without a cost, or a machine without the devices that this planner plans for.
        """


def cpu_devices(machine: Machine) -> list[Device]:
    """The machine's CPU devices, of which there must be one."""
    found = [device for device in machine.devices if device.kind == "cpu"]
    if not found:
        names = ", ".join(f"{device.name} ({device.kind})" for device in machine.devices)
        raise InputError(f"machine: expected at least one cpu device, got only {names}")
    return found
