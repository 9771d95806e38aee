"""How short a plan can possibly be, how long the serial one is, and where a timeline lies between the two.

The measure is the scheduling efficiency of TicTac (Hashemi, Jyothi, Campbell: "TicTac: Accelerating distributed deep
learning with communication scheduling", MLSys 2019, section 3)::

    efficiency = (U - m) / (U - L)         L        m                    U
                                           |--------|--------------------|---> time
                                           1                             0

with the makespan m, the lower bound L and the upper bound U. L is the larger of two facts about every legal plan:
it cannot be shorter than its longest chain of ops, each as fast as it can be; and its ops have to fit, as areas of
time by threads, into the threads that there are. An op's area is least where it scales worst, so width 1 decides,
unless an op scales better than linearly. On GPUs, where there is no CPU device beside them, an op's area is its
duration by its share of the multiprocessors (`hocket.ir.Share`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Machine, Op, Plan, Timeline
from hocket.planning.base import cpu_devices
from hocket.planning.ranks import graph_ranks
from hocket.planning.serial import Serial
from hocket.simulation import simulate

__all__ = ["Bounds", "bounds", "efficiency"]


@dataclass(frozen=True)
class Bounds:
    """Between what a step's makespan lies.

    Attributes:
        lower_us: no legal plan is shorter.
        upper_us: the ops one after another, at the full width of the first CPU device; or, where there is none, on one
            stream of the first GPU.
        critical_path_us: the longest chain of ops, each at its fastest width or device.
        work_us: time by threads that all ops together need at the least, in thread-microseconds; ops that might run
            on a stream or a channel are not counted. Without a CPU device: time by GPUs.
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
    least = [_least(op, costs, machine) for op in graph.ops]
    critical_path_us = max(graph_ranks(graph, [duration_us for duration_us, _ in least]), default=0.0)
    if any(device.kind == "cpu" for device in machine.devices):
        work_us = math.fsum(area_us for _, area_us in least)
        workers = sum(device.cores * device.smt for device in cpu_devices(machine))
        one_by_one = Serial().plan(graph, costs, machine)
    else:
        work_us = math.fsum(_gpu_area(op, costs, machine) for op in graph.ops)
        workers = len(machine.devices)
        one_by_one = Plan((Lane("stream", graph.order, "stream", machine.devices[0].name),))
    upper_us = simulate(graph, one_by_one, costs, machine).makespan_us
    # The serial plan is legal, so only rounding can lift the lower bound above it.
    lower_us = min(max(critical_path_us, work_us / workers), upper_us)
    return Bounds(lower_us, upper_us, critical_path_us, work_us)


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


def _least(op: Op, costs: Costs, machine: Machine) -> tuple[float, float]:
    """The least duration and the least area of `op`, each over all places where it may run."""
    places = [*_on_devices(op, costs, machine), *_on_links(op, costs, machine)]
    if not places:
        raise InputError(f"costs: no duration for op {op.name!r} on any device of the machine")
    return min(duration_us for duration_us, _ in places), min(duration_us * width for duration_us, width in places)


def _gpu_area(op: Op, costs: Costs, machine: Machine) -> float:
    """The least duration by share of a GPU; 0 where some GPU is not known to be kept busy, or a link may carry it."""
    if op.role in ("recv", "send"):
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

    A duration is linear between neighbouring widths that have a cost, and constant beyond them. So it is least at
    one of these widths; and so is the area, which between two of them is concave or, while the duration is not
    negative, rising, and which beyond the last one rises. A cost for one width of one device stands alone.
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


def _on_links(op: Op, costs: Costs, machine: Machine) -> Iterator[tuple[float, int]]:
    if op.role in ("recv", "send", "other"):
        for link in machine.links:
            channel = f"{link.src}->{link.dst}"
            if op.name not in costs:
                yield link.duration_us(op.size_bytes), 0
            elif _has_cost(op, costs, channel):
                yield costs.duration_us(op.name, device=channel), 0


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
