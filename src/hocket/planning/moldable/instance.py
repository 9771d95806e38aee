"""Ops of chosen widths on the cores of one device: from placements to lanes.

An op that may run at several widths is *moldable*. A planner decides its width and its place in the order
(`parallel_sgs` or `serial_sgs` place it), and `as_plan` makes a lane of each set of cores that ops ran on. Lanes that
share a core take turns by `after`: an op waits for the previous ops on its cores if those are on other lanes::

    cores 0  [   a (2 cores)   ][ b ][   d   ]      lane 0-1: a      lane 0: b, d     b after a
          1  [                 ][    c    ][ e ]                     lane 1: c, e     c after a
          ----------------------------------> time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Lane, Plan
from hocket.ir.placement import lane_name
from hocket.planning.ranks import upward_ranks


class Placement(NamedTuple):
    """`op` (its position in the graph) on `cores`, from `start_us` to `end_us`."""

    op: int
    cores: tuple[int, ...]
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Instance:
    """A graph as numbers, for the inner loops of planners."""

    num_cores: int  # of the device
    durations_us: Sequence[Sequence[float]]  # ``durations_us[op][width]``, where index 0 is not used
    predecessors: Sequence[Sequence[int]]  # positions of ops
    successors: Sequence[Sequence[int]]
    order: Sequence[int]  # the ops in `Graph.order`
    best_width: Sequence[int]  # for each op the width at which it is fastest, the narrowest of equals
    # when each op can start at the earliest, which never falls along an edge. Empty means at once.
    earliest_us: Sequence[float] = ()
    wait_us: float = 0.0  # delay before an op starts after an op of another lane that it waits for
    # for each op the ops that may not run beside it
    apart: Mapping[int, AbstractSet[int]] = field(default_factory=dict)

    def ready_us(self, op: int) -> float:
        """The earliest start of `op`."""
        return self.earliest_us[op] if self.earliest_us else 0.0

    def usable(self, widths: Sequence[int]) -> list[int]:
        """These widths, with the fastest in place of one at which an op may not run (`Costs.only_listed`)."""
        rows = zip(self.durations_us, widths, self.best_width, strict=True)
        return [best if of_op[width] == inf else width for of_op, width, best in rows]

    @cached_property
    def ranks_us(self) -> list[float]:
        """For each op the longest path to the end of the step, with every op at its best width."""
        return self.ranks_at_us(self.best_width)

    def ranks_at_us(self, widths: Sequence[int]) -> list[float]:
        """For each op the longest path from its start to the end of the step, at these widths."""
        durations_us = [row[width] for row, width in zip(self.durations_us, self.usable(widths), strict=True)]
        return upward_ranks(self.order, self.successors, durations_us)

    @cached_property
    def lower_us(self) -> float:
        """A lower bound of all placements: the longest path, or the least area over the cores."""
        areas = [min(width * us for width, us in enumerate(of_op) if width) for of_op in self.durations_us]
        return max(max(self.ranks_us, default=0.0), sum(areas) / self.num_cores)


def instance_of(
    graph: Graph, costs: Costs, device: Device, earliest_us: Mapping[str, float] | None = None, wait_us: float = 0.0
) -> Instance:
    """The numbers of `graph` on `device`, no start before `earliest_us`. An op without a cost is an `InputError`."""
    return tabled(graph, durations_of(graph, costs, device), earliest_us, wait_us)


def tabled(
    graph: Graph,
    table: npt.NDArray[np.float64],
    earliest_us: Mapping[str, float] | None = None,
    wait_us: float = 0.0,
    apart: Mapping[int, AbstractSet[int]] | None = None,
) -> Instance:
    """The numbers of `graph`, from the table that `durations_of` returns."""
    index = graph.index
    return Instance(
        num_cores=table.shape[1] - 1,
        durations_us=table.tolist(),
        predecessors=[[index[name] for name in graph.predecessors[op.name]] for op in graph.ops],
        successors=[[index[name] for name in graph.successors[op.name]] for op in graph.ops],
        order=[index[name] for name in graph.order],
        best_width=(table[:, 1:].argmin(axis=1) + 1).tolist(),
        earliest_us=[earliest_us.get(op.name, 0.0) for op in graph.ops] if earliest_us else (),
        wait_us=wait_us,
        apart=apart or {},
    )


def durations_of(graph: Graph, costs: Costs, device: Device) -> npt.NDArray[np.float64]:
    """`Costs.duration_us` of each op (row) at each width (column, where column 0 is not used).

    Ops with the same measured widths are looked up together: 3,000 ops at 68 widths would be 200,000 calls.
    """
    table = np.zeros((len(graph), device.cores + 1))
    alike: dict[tuple[str, ...], list[int]] = {}
    for op, described in enumerate(graph.ops):
        if described.name not in costs:
            raise InputError(f"costs: no duration for op {described.name!r}")
        alike.setdefault(tuple(costs.durations_us[described.name]), []).append(op)
    for keys, ops in alike.items():
        values = np.array([list(costs.durations_us[graph.ops[op].name].values()) for op in ops])
        column = {key: values[:, number] for number, key in enumerate(keys)}
        widths = sorted(int(key) for key in keys if key.isdecimal())
        for width in range(1, device.cores + 1):
            exact = next((key for key in (f"{device.name}:{width}", device.name, str(width)) if key in column), None)
            if exact is not None:
                table[ops, width] = column[exact]
                continue
            if costs.only_listed:
                table[ops, width] = np.inf
                continue
            if not widths:
                costs.duration_us(graph.ops[ops[0]].name, width=width, device=device.name)  # raises
            at = sum(known < width for known in widths)
            if at in (0, len(widths)):
                table[ops, width] = column[str(widths[min(at, len(widths) - 1)])]
            else:
                low, high = column[str(widths[at - 1])], column[str(widths[at])]
                table[ops, width] = low + (width - widths[at - 1]) / (widths[at] - widths[at - 1]) * (high - low)
    return table


def makespan_us(placed: Sequence[Placement]) -> float:
    """The end of the last op."""
    return max((placement.end_us for placement in placed), default=0.0)


def as_plan(
    graph: Graph,
    placed: Sequence[Placement],
    device: Device,
    planner: str,
    apart: Mapping[int, AbstractSet[int]] | None = None,
) -> Plan:
    """A plan of these placements, with waits between ops that share cores or are kept `apart`.

    An op on sibling threads (numbers from the device's cores on) starts beside the op that has their cores.
    """
    lanes: dict[tuple[int, ...], list[str]] = {}
    after: dict[str, tuple[str, ...]] = {}
    last_on: dict[int, Placement] = {}
    done: dict[int, Placement] = {}
    waits: dict[int, list[int]] = {}
    turn = {op: position for position, op in enumerate(map(graph.index.__getitem__, graph.order))}
    for placement in sorted(placed, key=lambda p: (p.start_us, max(p.cores) >= device.cores, p.end_us, turn[p.op])):
        name = graph.ops[placement.op].name
        before: dict[int, None] = {}
        held_by = dict.fromkeys(map(graph.index.__getitem__, graph.predecessors[name]))
        for core in placement.cores:
            last = last_on.get(core)
            if last is not None:
                held_by[last.op] = None
                if last.end_us > placement.start_us * (1 + 1e-12) + 1e-9:
                    other = graph.ops[last.op].name
                    raise InputError(f"ops {other!r} and {name!r} overlap on core {core}")
                if last.cores != placement.cores:
                    before[last.op] = None
            host = last_on.get(core % device.cores)
            if core >= device.cores and host is not None and (last is None or last.start_us < host.start_us):
                before |= dict.fromkeys(waits[host.op])  # no earlier than the op that has the core
            last_on[core] = placement
        waits[placement.op] = list(held_by)
        for op in (apart or {}).get(placement.op, ()):
            if op in done and done[op].cores != placement.cores:
                before[op] = None
        done[placement.op] = placement
        data = set(graph.predecessors[name])
        needed = tuple(graph.ops[op].name for op in before if graph.ops[op].name not in data)
        if needed:
            after[name] = needed
        lanes.setdefault(placement.cores, []).append(name)
    widest_first = sorted(lanes, key=lambda cores: (-len(cores), cores))
    made = [
        Lane(lane_name(cores, device), tuple(lanes[cores]), "cores", device.name, len(cores), cores)
        for cores in widest_first
    ]
    return Plan(tuple(made), after, planner)
