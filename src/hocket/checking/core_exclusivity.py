"""Check that ops on lanes that share a core are ordered, so that no two of them run on the core at once.

All ops that use one core have to form a chain. In any order that respects every wait, it is enough to look at
neighbours of the chain: if each must have finished before the next may start, so must all before it. A neighbour
often waits directly. Where it does not, the clocks of `hocket.ir.synchronisation` decide if it is always before.

::

    wide    [ a ]-----.         .--->[ d ]          core 0: a, b, d: a before b, b before d
                      v         |                   core 1: a, c, d: c before d only if the plan says so
    narrow0         [ b ]-------'
    narrow1         [ c ] . . . ?

Where lanes name hardware threads one by one, the same holds for each thread in place of each core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from hocket.errors import PlanError
from hocket.ir import Graph, Lane, Machine, Plan, hardware_threads, synchronisation


def check_core_exclusivity(
    graph: Graph, plan: Plan, machine: Machine | None, waits: Mapping[str, Sequence[str]], order: Sequence[str]
) -> None:
    """Raise a `PlanError` for two ops that share a core and have no order.

    `waits` has all that each op waits for directly, the op before it on its lane included, and `order` respects them.
    Lanes that are not pinned are checked with a machine alone.
    """
    when = {op: position for position, op in enumerate(order)}
    unclear: dict[tuple[str, str], None] = {}
    for lanes in set(_sharing(plan, machine)):
        chain = sorted((op for lane in lanes for op in plan.lanes[lane].ops), key=when.__getitem__)
        for before, op in pairwise(chain):
            if before not in waits[op]:
                unclear[before, op] = None
    if not unclear:
        return
    sync = synchronisation(graph, plan)
    for before, op in sorted(unclear, key=lambda pair: (when[pair[1]], when[pair[0]])):
        if not sync.before(before, op):
            one, other = plan.lane_of[before], plan.lane_of[op]
            raise PlanError(
                f"ops {before!r} (lane {one.name!r}, {_cores(one)}) and {op!r} (lane {other.name!r}, "
                f"{_cores(other)}) share a core of {one.device!r}, and nothing orders them: "
                "make one wait for the other with `after`",
                op=op,
                lane=other.name,
            )


def _sharing(plan: Plan, machine: Machine | None) -> Iterator[tuple[int, ...]]:
    """For each core that several lanes use, these lanes by their position in the plan.

    With a `machine`, for each hardware thread (see `hocket.ir.hardware_threads`).
    """
    devices: dict[str, list[int]] = {}
    for position, lane in enumerate(plan.lanes):
        if lane.kind == "cores" and lane.ops:
            devices.setdefault(lane.device, []).append(position)
    for name, positions in devices.items():
        device = machine.by_name[name] if machine is not None else None
        pinned: dict[int, list[int]] = {}
        loose = [position for position in positions if not plan.lanes[position].cores]
        for position in positions:
            lane = plan.lanes[position]
            for thread in hardware_threads(lane, device) if device is not None else lane.cores:
                pinned.setdefault(thread, []).append(position)
        if loose and device is not None:
            width = sum(plan.lanes[position].width for position in loose)
            taken = len({thread % device.cores for thread in pinned})
            if width > (device.cores - taken) * device.smt:
                yield tuple(loose)
                for thread in pinned:
                    pinned[thread] += loose
        for users in pinned.values():
            if len(users) > 1:
                yield tuple(sorted(users))


def _cores(lane: Lane) -> str:
    return f"cores {','.join(map(str, lane.cores))}" if lane.cores else f"width {lane.width}, not pinned"
