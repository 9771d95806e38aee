"""Placement of a plan's lanes on neighbouring cores, or on one core of each cache first.

Planners give lanes neighbouring cores, which is best for threads that share data in one cache. Threads that each need a
whole cache are faster in different caches (Liu et al., IPDPS 2019, sections III-B and III-C: every width is profiled
with and without cache sharing). The costs say which was measured to be faster (`hocket.profiling.hill_climb`). A plan
of scattered lanes is a plan of neighbours with its cores counted in another order::

    caches       [0 1] [2 3] [4 5] [6 7]
    compact       0 1   2 3   4 5   6 7        a lane of cores 0-3 fills two caches
    scatter       0 4   1 5   2 6   3 7        a lane of cores 0-3 has one core of each of four caches: 0, 2, 4, 6

Lanes that share a core still do so afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.ir import Device, Lane, Machine, Plan


def scattered_cores(device: Device) -> tuple[int, ...]:
    """The cores of a device: the first one of each cache, then the second ones, and so on.

    Example:
        >>> scattered_cores(Device("cpu0", cores=8, cores_per_cache=2))
        (0, 2, 4, 6, 1, 3, 5, 7)
    """
    size = device.cores_per_cache
    return tuple(core for first in range(size) for core in range(first, device.cores, size))


def scattered(plan: Plan, machine: Machine) -> Plan:
    """The same plan on scattered cores, on devices whose cores share caches.

    Example:
        >>> print(scattered(Plan((Lane("a", ("x",), width=2, cores=(0, 1)),)), Machine.of(cores=4, cores_per_cache=2)))
        hocket-plan/1
        lane a kind=cores device=cpu0 width=2 cores=0,2
        run x
        <BLANKLINE>
    """
    return replace(plan, lanes=tuple(_moved(lane, machine.by_name.get(lane.device)) for lane in plan.lanes))


def _moved(lane: Lane, device: Device | None) -> Lane:
    if lane.kind != "cores" or not lane.cores or device is None or device.cores_per_cache == 1:
        return lane
    order = scattered_cores(device)
    # Numbers from the device's cores on are sibling threads of the same cores.
    cores = tuple(order[core % device.cores] + core // device.cores * device.cores for core in lane.cores)
    return replace(
        lane, cores=cores, name=lane_name(cores, device) if lane.name == lane_name(lane.cores, device) else lane.name
    )


def lane_name(cores: Sequence[int], device: Device) -> str:
    """The name of a lane on these cores, such as ``cpu0.4-7`` or ``cpu0.4-5+8-9``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return f"{device.name}." + "+".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
