"""Launches: a stream runs nothing that the host has not launched yet.

One host thread for each GPU launches its ops one by one, ahead of the device, in `hocket.ir.launch_order`, and never
waits for it. So launch k ends at k times what a launch takes, whatever runs meanwhile, and an op starts then at the
earliest. A step captured as a CUDA graph is launched at once; the device then takes a little for each op, except for
those that stay outside and are launched one by one::

    host     | a | b | c | d | e |            eager: 5 us each
    device       [a]   [ b  ][c] [d][e]       too short to hide the launches that follow

The first launch begins when the step does: what a host gains by running ahead from one step into the next is seen by
simulating several steps in a row (`hocket.simulation.steps`).
"""

from __future__ import annotations

from collections.abc import Collection

from hocket.errors import InputError
from hocket.ir import Graph, Machine, Plan, launch_order

LAUNCHES = ("free", "eager", "graph")


def released_us(
    graph: Graph, plan: Plan, machine: Machine, launches: str, outside: Collection[str] = ()
) -> list[float] | None:
    """For each op, in the order of the graph, when it has been launched; None where that takes no time.

    Raises:
        InputError: `launches` is none of `LAUNCHES`.
    """
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
