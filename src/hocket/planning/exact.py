"""`exact`: the shortest plan of a graph of a dozen ops, as ground truth for the other planners.

Moldable ops on the cores of one device are a multi-mode project in constraint programming: each op has one of its
widths, the duration of that width, and uses that many cores of a cumulative resource. OR-Tools' CP-SAT (Perron, Didier:
https://developers.google.com/optimization/cp/cp_solver) proves the optimum.

Its times are integers, so durations are rounded up to a 20,000th of the serial step. The search ends at a plan that is
proved to be within a thousandth of the shortest, since the rest of the proof takes most of the time. The solver decides
widths and the order of starts. Placed again in that order with exact durations, no op starts later than in the
solver's schedule. So a finished plan is longer than the shortest one by at most a thousandth, and a 20,000th of the
serial step for each op. Waking lanes costs nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.errors import InputError, MissingDependencyError
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.base import Planner, cpu_devices
from hocket.planning.moldable.instance import Instance, Placement, as_plan, instance_of
from hocket.planning.moldable.sgs import serial_sgs
from hocket.planning.moldable.widths import useful_widths

RESOLUTION = 20_000
GAP = 0.001
# The solver's strategies run side by side, so the plan that has the optimum may differ between runs.
WORKERS = 8


class Exact(Planner):
    """The optimum by CP-SAT, within a thousandth, for small graphs.

    Args:
        time_limit_s: give up the proof after this long, and take the best plan found until then.
        max_ops: refuse larger graphs.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> costs = Costs({op: {"1": 30.0, "2": 20.0} for op in "abc"})
        >>> plan = Exact().plan(Graph((Op("a"), Op("b"), Op("c"))), costs, Machine.of(cores=2))  # doctest: +SKIP
    """

    name = "exact"
    automatic = False

    def __init__(self, time_limit_s: float = 60.0, max_ops: int = 24) -> None:
        if time_limit_s <= 0:
            raise InputError(f"planner exact: expected time_limit_s > 0, got {time_limit_s}")
        self.require_whole(max_ops=max_ops)
        self.time_limit_s = time_limit_s
        self.max_ops = max_ops

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        if len(graph) > self.max_ops:
            raise InputError(
                f"planner exact: {len(graph)} ops, and the optimum is searched for up to {self.max_ops}; "
                "raise max_ops, or take another planner"
            )
        device = cpu_devices(machine)[0]
        placed, _ = solve(instance_of(graph, costs, device, earliest_us), self.time_limit_s)
        return as_plan(graph, placed, device, self.name)


def solve(instance: Instance, time_limit_s: float = 60.0) -> tuple[list[Placement], bool]:
    """The shortest placements, up to the tolerance above, and True if that was proved."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingDependencyError("ortools", "exact", "the planner exact") from None
    serial_us = sum(of_op[width] for of_op, width in zip(instance.durations_us, instance.best_width, strict=True))
    if serial_us == 0.0:
        order = sorted(instance.order, key=instance.ready_us)
        return serial_sgs(instance, instance.best_width, order), True
    # A width at which one op takes longer than the serial step is never useful, and its duration may overflow.
    options = [
        {  # an interval of length 0 would not exclude others
            width: max(1, math.ceil(of_op[width] / serial_us * RESOLUTION))
            for width in useful_widths(of_op)
            if of_op[width] <= serial_us
        }
        for of_op in instance.durations_us
    ]
    earliest = [math.ceil(instance.ready_us(op) / serial_us * RESOLUTION) for op in range(len(options))]
    model = cp_model.CpModel()
    chosen = _model(model, instance, options, earliest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.relative_gap_limit = GAP
    solver.parameters.num_workers = WORKERS
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"planner exact: no plan found within {time_limit_s:g} s")
    starts = [solver.value(start) for start, _ in chosen]
    widths = [next(width for width, on in taken.items() if solver.value(on)) for _, taken in chosen]
    place = {op: position for position, op in enumerate(instance.order)}
    order = sorted(instance.order, key=lambda op: (starts[op], place[op]))
    return serial_sgs(instance, widths, order), status == cp_model.OPTIMAL


def _model(
    model: Any, instance: Instance, options: Sequence[dict[int, int]], earliest: Sequence[int]
) -> list[tuple[Any, dict[int, Any]]]:
    """For each op the variable of its start, and one variable for each of its widths.

    `options` has the widths of each op, with the duration at each, and `earliest` its earliest start, as integers.
    """
    fastest = [min(lengths.values()) for lengths in options]
    head = list(earliest)  # the longest path to an op, and from its end to that of the step
    tail = [0] * len(options)
    for op in instance.order:
        head[op] = max([head[op], *(head[other] + fastest[other] for other in instance.predecessors[op])])
    for op in reversed(instance.order):
        tail[op] = max((tail[other] + fastest[other] for other in instance.successors[op]), default=0)
    horizon = max(earliest, default=0) + sum(fastest)
    makespan = model.new_int_var(0, horizon, "makespan")
    chosen: list[tuple[Any, dict[int, Any]]] = []
    ends: list[Any] = []
    intervals, demands, area = [], [], []
    for op, lengths in enumerate(options):
        start = model.new_int_var(head[op], horizon, f"start{op}")
        end = model.new_int_var(0, horizon, f"end{op}")
        taken = {}
        for width, length in lengths.items():
            on = taken[width] = model.new_bool_var(f"op{op}width{width}")
            intervals.append(model.new_optional_interval_var(start, length, end, on, f"op{op}at{width}"))
            demands.append(width)
            area.append(width * length * on)
        model.add_exactly_one(taken.values())
        model.add(end == start + sum(length * taken[width] for width, length in lengths.items()))
        model.add(end + tail[op] <= makespan)
        chosen.append((start, taken))
        ends.append(end)
    model.add_cumulative(intervals, demands, instance.num_cores)
    model.add(sum(area) <= instance.num_cores * makespan)  # redundant, but speeds up the proof
    for op, before in enumerate(instance.predecessors):
        for other in before:
            model.add(chosen[op][0] >= ends[other])
    model.minimize(makespan)
    return chosen
