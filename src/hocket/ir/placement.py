"""Placement of a plan's lanes on neighbouring cores, or on one core of each cache first.

Planners give lanes neighbouring cores, which is best for threads that share data in one cache. Threads that each need a
whole cache are faster in different caches (Liu et al., IPDPS 2019, sections III-B and III-C: every width is profiled
with and without cache sharing). The costs say which was measured to be faster (`hocket.profiling.hill_climb`). A plan
of scattered lanes is a plan of neighbours with its cores counted in another order::

    caches       [0 1] [2 3] [4 5] [6 7]
    compact       0 1   2 3   4 5   6 7        a lane of cores 0-3 fills two caches
    scatter       0 4   1 5   2 6   3 7        a lane of cores 0-3 has one core of each of four caches: 0, 2, 4, 6

Lanes that share a core still do so afterwards.

Each op was measured in both, and some may be faster in the other one than the step as a whole. `with_own_cores` gives
such an op its own cores, on a further lane, if no op that uses one of them can run beside it. The order of the ops does
not change. Of b and c, which are both faster scattered, c runs alone::

    cores 0, 1   [ a ][ b ]      [ d ]
    cores 2, 3   [ e ][ f ]
    cores 0, 2              [ c ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hocket.ir import Device, Graph, Lane, Machine, Plan, execution_order, synchronisation


def scattered_cores(device: Device) -> tuple[int, ...]:
    """The cores of a device: the first one of each cache, then the second ones, and so on."""
    size = device.cores_per_cache
    return tuple(core for first in range(size) for core in range(first, device.cores, size))


def scattered(plan: Plan, machine: Machine) -> Plan:
    """The same plan on scattered cores, on devices whose cores share caches."""
    return replace(plan, lanes=tuple(_moved(lane, machine.by_name.get(lane.device)) for lane in plan.lanes))


def with_own_cores(plan: Plan, graph: Graph, machine: Machine, placements: Mapping[str, str]) -> Plan:
    """The same plan with ops on the cores of their own placements, where those are free. The other lanes stay.

    The lanes of `plan`, a legal one, have the other placement. `placements` maps ops to ``compact`` or ``scatter``.
    """
    sync = synchronisation(graph, plan)
    when = {op: at for at, op in enumerate(execution_order(graph, plan))}
    lanes = {lane.name: lane for lane in plan.lanes}
    lane_of: dict[str, str] = {}  # of the ops that get other cores
    last: dict[str, dict[int, str]] = {}  # of each lane in use for them, the last op from each lane of the plan
    for op in sorted(placements.keys() & when.keys(), key=when.__getitem__):
        number, _ = sync.place[op]
        lane = _in_placement(plan.lanes[number], machine, placements[op])
        if lane is None or replace(lanes.get(lane.name, lane), ops=()) != lane:
            continue
        beside = [(n, other) for n, other in enumerate(plan.lanes) if n != number and _may_share(lane, other, machine)]
        rest = [other.ops[sync.clocks[op][n]] for n, other in beside if sync.clocks[op][n] < len(other.ops)]
        moved = [one for name in last if _may_share(lane, lanes[name], machine) for one in last[name].values()]
        if all(sync.before(op, one) for one in rest) and all(sync.before(one, op) for one in moved):
            lanes.setdefault(lane.name, lane)
            lane_of[op] = lane.name
            last.setdefault(lane.name, {})[number] = op
    after = {op: list(others) for op, others in plan.after.items()}
    for lane in plan.lanes:
        for before, op in pairwise(lane.ops):
            if lane_of.get(before, lane.name) != lane_of.get(op, lane.name):
                after.setdefault(op, []).append(before)
    ops: dict[str, list[str]] = {name: [op for op in lane.ops if op not in lane_of] for name, lane in lanes.items()}
    for op, name in lane_of.items():
        ops[name].append(op)
    made = [replace(lane, ops=tuple(sorted(ops[name], key=when.__getitem__))) for name, lane in lanes.items()]
    unique = {op: tuple(dict.fromkeys(others)) for op, others in after.items()}
    return replace(plan, lanes=tuple(lane for lane in made if lane.ops), after=unique)


def _in_placement(lane: Lane, machine: Machine, placement: str) -> Lane | None:
    """An empty lane as wide as this one on the cores of a placement, or None if it has only one."""
    device = machine.by_name.get(lane.device)
    if device is None or lane.kind != "cores" or not 1 < len(lane.cores) <= device.cores // device.cores_per_cache:
        return None
    order = scattered_cores(device)
    if device.cores_per_cache == 1 or max(lane.cores) >= device.cores:
        return None
    cores = tuple(order[core] if placement == "scatter" else order.index(core) for core in lane.cores)
    return None if set(cores) == set(lane.cores) else replace(lane, ops=(), cores=cores, name=lane_name(cores, device))


def _may_share(one: Lane, other: Lane, machine: Machine) -> bool:
    """True if two lanes may use the same core."""
    if one.device != other.device or other.kind != "cores":
        return False
    num_cores = machine.by_name[one.device].cores
    used = [{core % num_cores for core in lane.cores} for lane in (one, other)]
    return not all(used) or not used[0].isdisjoint(used[1])


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
