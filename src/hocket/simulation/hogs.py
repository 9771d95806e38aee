"""Another program on a device: what a step's ops take beside it."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.errors import InputError
from hocket.ir import Costs, Machine


def hogged(costs: Costs, machine: Machine, hogs: Mapping[str, float]) -> Costs:
    """The costs on every device of a machine, longer where another program takes a part of the device.

    Args:
        costs: of ops that run alone.
        machine: its devices are priced each, at their full width.
        hogs: for each device that has one, the part of it that it takes; 0.5 doubles durations.

    Raises:
        InputError: an unknown device, or a part outside of [0, 1).

    Example:
        >>> costs = Costs({"a": {"1": 30.0}})
        >>> hogged(costs, Machine.of(cores=1), {"cpu0": 0.5}).duration_us("a", device="cpu0")
        60.0
    """
    for name, part in hogs.items():
        if name not in machine.by_name or not 0 <= part < 1:
            raise InputError(f"hogs: expected a device of the machine and a part in [0, 1), got {name!r}: {part}")
    return Costs(
        {
            op: {
                f"{device.name}:{device.cores}": costs.duration_us(op, width=device.cores, device=device.name)
                / (1.0 - hogs.get(device.name, 0.0))
                for device in machine.devices
            }
            for op in costs.durations_us
        }
    )
