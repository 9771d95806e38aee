"""Launches: a stream runs an op only after the host has launched it.

One host thread for each GPU launches its ops one by one, ahead of the device, in `hocket.ir.launch_order`, and never
waits for it. So launch k ends after k times the time of a launch, and the op starts then at the earliest. A step
captured as a CUDA graph is launched at once. The device then needs a little time for each op, and ops that are outside
of the graph are launched one by one::

    host     | a | b | c | d | e |            eager: 5 us each
    device       [a]   [ b  ][c] [d][e]       too short to hide the launches that follow

The first launch begins with the step. To see the gain of a host that runs ahead into the next step, simulate several
steps in a row (`hocket.simulation.steps`).
"""

from __future__ import annotations

from collections.abc import Collection

from hocket.errors import InputError
from hocket.ir import Graph, Machine, Plan, launch_order

LAUNCHES = ("free", "eager", "graph")


def released_us(
    graph: Graph, plan: Plan, machine: Machine, launches: str, outside: Collection[str] = ()
) -> list[float] | None:
    """The end of each op's launch, in the order of the graph, None if they take no time, or an `InputError`."""
    if launches not in LAUNCHES:
        raise InputError(f"simulate: expected launches to be one of {', '.join(LAUNCHES)}, got {launches!r}")
    if launches == "free":
        return None
    gpus = {device.name: device for device in machine.devices if device.kind == "cuda"}
    apart = set(outside)
    cost_us = {
        op: gpus[lane.device].launch_us if launches == "eager" or op in apart else gpus[lane.device].graph_launch_us
        for lane in plan.lanes
        if lane.kind == "stream" and lane.device in gpus
        for op in lane.ops
    }
    if not any(cost_us.values()):
        return None
    released = [0.0] * len(graph)
    now_us = dict.fromkeys(gpus, 0.0)
    for op in launch_order(graph, plan):
        if op in cost_us:
            device = plan.lane_of[op].device
            now_us[device] += cost_us[op]
            released[graph.index[op]] = now_us[device]
    return released
