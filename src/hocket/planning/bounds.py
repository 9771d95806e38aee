"""Lower and upper bounds of the makespan, and the position of a timeline between them.

The measure is the scheduling efficiency of TicTac (Hashemi, Jyothi, Campbell: "TicTac: Accelerating distributed deep
learning with communication scheduling", MLSys 2019, section 3)::

    efficiency = (U - m) / (U - L)         L        m                    U
                                           |--------|--------------------|---> time
                                           1                             0

with the makespan m, the lower bound L and the upper bound U. L is the larger of two bounds of every legal plan: its
longest chain of ops, each at its fastest width, and the total area of its ops (duration times threads) over the number
of threads. An op's area is least at width 1, unless the op scales better than linearly. On a machine without a CPU
device, an op's area is its duration times its share of the GPU's multiprocessors (`hocket.ir.Share`).

Transfers (`hocket.planning.channels`) count in both bounds: U has them one after another with all other ops, and L is
at least the load of the links. The largest possible gain of an order is the *potential* S of the same section::

    S = (U - L) / L         0 if one resource is the bottleneck, so that no order gains,    1 for twice as fast
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Link, Machine, Op, Plan, Timeline
from hocket.planning.base import cpu_devices
from hocket.planning.channels import ROLES, links_of, transfers_of, without_transfers
from hocket.planning.ranks import graph_ranks
from hocket.planning.serial import Serial
from hocket.simulation import simulate
from hocket.simulation.durations import transfer_us


@dataclass(frozen=True)
class Bounds:
    """The bounds of a step's makespan.

    Attributes:
        lower_us: no legal plan is shorter.
        upper_us: the ops one after another at the full width of the first CPU device (or on one stream of the first
            GPU, without a CPU device), and each transfer alone on its link.
        critical_path_us: the longest chain of ops, each at its fastest width or device.
        work_us: the least total area of all ops, in thread-microseconds (GPU-microseconds without a CPU device). Ops
            that may run on a stream, and transfers that may go over a channel, are not counted.
    """

    lower_us: float
    upper_us: float
    critical_path_us: float
    work_us: float


def bounds(graph: Graph, costs: Costs, machine: Machine) -> Bounds:
    """The bounds of every plan of `graph` on `machine` that `hocket.check` accepts.

    Raises:
        InputError: an op without a cost.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> costs = Costs({op: {"1": 30.0, "2": 20.0} for op in "abc"})
        >>> bounds(Graph((Op("a"), Op("b"), Op("c"))), costs, Machine.of(cores=2))
        Bounds(lower_us=45.0, upper_us=60.0, critical_path_us=20.0, work_us=90.0)
    """
    transfers = transfers_of(graph, costs, machine)
    least = [_least(op, costs, machine) for op in graph.ops]
    compute = without_transfers(graph, transfers)
    critical_path_us = max(graph_ranks(graph, [duration_us for duration_us, _ in least]), default=0.0)
    if any(device.kind == "cpu" for device in machine.devices):
        areas_us = [area_us for _, area_us in least]
        workers = sum(device.cores * device.smt for device in cpu_devices(machine))
        one_by_one = Serial().plan(compute, costs, machine)
    else:
        areas_us = [_gpu_area(op, costs, machine) for op in graph.ops]
        workers = len(machine.devices)
        one_by_one = Plan((Lane("stream", compute.order, "stream", machine.devices[0].name),))
    links = links_of(graph, transfers, costs, machine)
    upper_us = simulate(compute, one_by_one, costs, machine).makespan_us
    upper_us += math.fsum(transfer_us(graph[name], link, costs) for name, link in links.items())
    lower_us = max(
        critical_path_us,
        _crowded_us(graph, areas_us, workers, costs, machine),
        _wire_us(graph, transfers, costs, machine),
    )
    # The serial plan is legal, so only rounding can lift the lower bound above it.
    lower_us = min(lower_us, upper_us)
    return Bounds(lower_us, upper_us, critical_path_us, math.fsum(areas_us))


def efficiency(timeline: Timeline, bounds: Bounds) -> float:
    """Where the makespan lies between the upper bound (0.0) and the lower bound (1.0).

    Below 0 for a timeline that takes longer than the serial plan, 1.0 if the bounds are equal.

    Example:
        >>> from hocket.ir import Span, Timeline
        >>> timeline = Timeline((Span("a", "main", 0.0, 50.0),), ("main",))
        >>> efficiency(timeline, Bounds(40.0, 60.0, 20.0, 80.0))
        0.5
    """
    if bounds.upper_us == bounds.lower_us:
        return 1.0
    return (bounds.upper_us - timeline.makespan_us) / (bounds.upper_us - bounds.lower_us)


def potential(bounds: Bounds) -> float:
    """The largest possible gain over the serial plan, ``(U - L) / L``, or 0 if L is 0.

    Example:
        >>> potential(Bounds(40.0, 60.0, 20.0, 80.0))
        0.5
    """
    return (bounds.upper_us - bounds.lower_us) / bounds.lower_us if bounds.lower_us else 0.0


def _crowded_us(graph: Graph, areas_us: Sequence[float], workers: int, costs: Costs, machine: Machine) -> float:
    """The least time in which `workers`, or workers and channels together, can run ops of these areas.

    An op of the role ``other`` may go over a link as well. It then needs a channel and no worker.
    """
    wired_us = [min(_on_links(op, costs, machine), default=math.inf) for op in graph.ops]
    bound_us = math.fsum(area for area, us in zip(areas_us, wired_us, strict=True) if us == math.inf) / workers
    channels = [link.channels for link in machine.links]
    if None in channels:
        return bound_us
    least_us = math.fsum(map(min, areas_us, wired_us))
    return max(bound_us, least_us / (workers + sum(count for count in channels if count)))


def _wire_us(graph: Graph, transfers: Sequence[str], costs: Costs, machine: Machine) -> float:
    """The least time of the links that alone can carry some transfers."""
    load_us: dict[tuple[Link, ...], float] = {}
    for name in transfers:
        op = graph[name]
        able = tuple(link for link in machine.links if _carries(link, op, costs, machine))
        if not any(True for _ in _on_devices(op, costs, machine)):
            load_us[able] = load_us.get(able, 0.0) + min(_on_links(op, costs, machine), default=0.0)
    found = [0.0]
    for links, us in load_us.items():
        channels = [link.channels for link in links]
        if None not in channels:
            found.append(us / sum(count for count in channels if count))
    return max(found)


def _carries(link: Link, op: Op, costs: Costs, machine: Machine) -> bool:
    """Return True if `hocket.check` allows a transfer on this link and its duration there is known."""
    return machine.carries(link, op.role) and (op.name not in costs or _has_cost(op, costs, link.channel))


def _least(op: Op, costs: Costs, machine: Machine) -> tuple[float, float]:
    """The least duration of `op` over all places where it may run, and its least area on devices (0 for a transfer)."""
    computing, wired_us = [*_on_devices(op, costs, machine)], _on_links(op, costs, machine)
    if not (computing or wired_us):
        raise InputError(f"costs: no duration for op {op.name!r} on any device of the machine")
    duration_us = min([*(us for us, _ in computing), *wired_us])
    if wired_us and (op.role in ROLES or not computing):
        return duration_us, 0.0
    return duration_us, min(duration_us * width for duration_us, width in computing)


def _gpu_area(op: Op, costs: Costs, machine: Machine) -> float:
    """The least duration times share over all GPUs, 0 if a share is unknown or a link may carry the op."""
    if op.role in ROLES:
        return 0.0
    areas = [
        costs.duration_us(op.name, device=device.name) * share.multiprocessors if share is not None else 0.0
        for device in machine.devices
        for share in [costs.shares.get(op.name, {}).get(device.name)]
        if _has_cost(op, costs, device.name)
    ]
    return min(areas, default=0.0)


def _on_devices(op: Op, costs: Costs, machine: Machine) -> Iterator[tuple[float, int]]:
    """Durations and widths, among them the fastest and the one of least area on each device.

    A duration is linear between neighbouring widths that have a cost, and constant beyond them. So the least duration
    is at one of these widths. So is the least area: between two of them it is concave or rising, and beyond the last
    one it rises. A cost for one width of one device is never interpolated.
    """
    row = costs.durations_us.get(op.name)
    if row is None:
        return
    for device in machine.devices:
        if device.kind != "cpu":
            if _has_cost(op, costs, device.name):
                yield costs.duration_us(op.name, device=device.name), 0
            continue
        own, shared = _widths(tuple(row), device.name, device.cores * device.smt)
        for width in own:
            yield costs.duration_us(op.name, width=width, device=device.name), width
        if device.name in row:
            yield row[device.name], 1
        else:
            for width in shared:
                yield costs.duration_us(op.name, width=width), width


def _on_links(op: Op, costs: Costs, machine: Machine) -> list[float]:
    """Durations on the links that may carry `op`."""
    links = machine.links if op.role in (*ROLES, "other") else ()
    return [transfer_us(op, link, costs) for link in links if _carries(link, op, costs, machine)]


def _has_cost(op: Op, costs: Costs, device: str) -> bool:
    try:
        costs.lookup(op.name, device=device)
    except InputError:
        return False
    return True


@cache
def _widths(keys: tuple[str, ...], device: str, threads: int) -> tuple[list[int], list[int]]:
    """Widths with a cost for `device` alone, and widths with a cost for all devices with the first and last one."""
    own = [int(key[len(device) + 1 :]) for key in keys if key.startswith(f"{device}:")]
    shared = {int(key) for key in keys if key.isdecimal()}
    if shared:
        shared |= {1, threads}
    return [width for width in own if width <= threads], sorted(width for width in shared if width <= threads)
