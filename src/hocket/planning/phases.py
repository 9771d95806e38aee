"""`phases`: one wide lane where ops wait for each other, narrow lanes side by side elsewhere, and few changes between.

The forward pass of most networks is a chain, in which each op should have all cores. The backward pass is two chains,
activation gradients and weight gradients, and there is one update for each parameter. There, ops of one core each run
side by side without idle cores. A change between the two costs tens of microseconds, because the threads of a wide op
sleep while narrow ones run and have to be woken. So the step is cut into phases::

    cores 0  |[ conv ][ norm ][ conv ]||[ dx ][ dx ][ dx ][ + ]|
          1  |[  wide: one by one    ]||[    dw ][ dw ][  dw ] |      narrow: by longest path, as `list` does
             '------------------------''----------------------'
                                     switch_us

Dynamic programming over a linear order of the ops decides where to cut: the cheapest way to run the first j ops is, for
some i, the cheapest way to run the first i ops and one phase for the others. The duration of a phase is estimated from
below, by its longest chain and by its area over the cores (Graham 1966 bounds the error). The best divisions are then
placed op by op, and the shortest of these is taken.

Two orders are tried: program order, and that of the longest paths to the end, which postpones ops that no op waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.base import Planner, cpu_devices
from hocket.planning.moldable.instance import Instance, Placement, as_plan, instance_of, makespan_us
from hocket.planning.moldable.sgs import parallel_sgs

# The most places for cuts, fewer in large graphs: the work grows with their square.
MAX_CUTS = 48
MAX_WORK = 150_000
MAX_LANES = 8

# Measured time of a change between a wide lane and narrow ones: the threads of the wide one have to be woken.
SWITCH_US = 60.0


class Phases(Planner):
    """Alternate between one wide lane and several narrow ones, a few times per step.

    Args:
        switch_us: time of a change between lanes that share cores.
        wait_us: delay before an op starts after an op of another lane that it waits for.

    Example:
        >>> from hocket.ir import Costs, Edge, Graph, Machine, Op
        >>> ops = tuple(Op(name) for name in ("conv", "dx", "dw"))
        >>> graph = Graph(ops, (Edge("conv", "dx"), Edge("conv", "dw")))
        >>> narrow = {"1": 100.0, "2": 90.0}
        >>> costs = Costs({"conv": {"1": 1000.0, "2": 500.0}, "dx": narrow, "dw": narrow})
        >>> plan = Phases().plan(graph, costs, Machine.of(cores=2))
        >>> [(lane.width, lane.ops) for lane in plan.lanes]
        [(2, ('conv',)), (1, ('dx',)), (1, ('dw',))]
    """

    name = "phases"

    def __init__(self, switch_us: float = SWITCH_US, wait_us: float = 3.0) -> None:
        self.require_finite(switch_us=switch_us, wait_us=wait_us)
        self.switch_us = switch_us
        self.wait_us = wait_us

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        device = cpu_devices(machine)[0]
        instance = instance_of(graph, costs, device, earliest_us, self.wait_us)
        ranks = instance.ranks_at_us([instance.num_cores] * len(graph))
        place = {op: position for position, op in enumerate(instance.order)}
        orders = (instance.order, sorted(instance.order, key=lambda op: (-ranks[op], place[op])))
        placed = (in_phases(instance, sorted(order, key=instance.ready_us), self.switch_us) for order in orders)
        return as_plan(graph, min(placed, key=makespan_us), device, self.name)


def in_phases(instance: Instance, order: Sequence[int], switch_us: float) -> list[Placement]:
    """Placements of the cheapest division of an order into phases, by longest path inside a phase."""
    placed: list[Placement] = []
    begin_us = 0.0
    for lanes, ops in divide(instance, order, switch_us):
        part = _part(instance, ops, begin_us)
        widths = part.usable([instance.num_cores // lanes] * len(ops))
        inside = parallel_sgs(part, widths, part.ranks_at_us(widths))
        placed += [Placement(ops[p.op], p.cores, p.start_us + begin_us, p.end_us + begin_us) for p in inside]
        begin_us += makespan_us(inside) + switch_us
    return placed


def divide(instance: Instance, order: Sequence[int], switch_us: float) -> list[tuple[int, list[int]]]:
    """The phases of the cheapest division: for each its number of equal lanes, and its ops in `order`."""
    counts = [k for k in range(1, min(MAX_LANES, instance.num_cores) + 1) if instance.num_cores % k == 0]
    cuts = _cuts(instance, order, len(counts))
    # best[j]: the cheapest way to the j-th cut, as (time, number of lanes of its last phase, where that began).
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)] + [(inf, 0, 0)] * (len(cuts) - 1)
    for first in range(len(cuts) - 1):
        for lanes in counts:
            begin_us = best[first][0] + (switch_us if first and best[first][1] != lanes else 0.0)
            for last, phase_us in enumerate(_phases_from(instance, order, cuts, first, lanes), first + 1):
                if begin_us + phase_us < best[last][0]:
                    best[last] = (begin_us + phase_us, lanes, first)
    phases: list[tuple[int, list[int]]] = []
    at = len(cuts) - 1
    while at:
        _, lanes, first = best[at]
        ops = list(order[cuts[first] : cuts[at]])
        if phases and phases[-1][0] == lanes:
            phases[-1] = (lanes, ops + phases[-1][1])
        else:
            phases.append((lanes, ops))
        at = first
    return phases[::-1]


def _cuts(instance: Instance, order: Sequence[int], num_counts: int) -> list[int]:
    """Positions in `order` at which a phase may begin or end, about equally far apart in time."""
    if not order:
        return [0]
    num_cuts = max(2, min(MAX_CUTS, len(order), MAX_WORK // (len(order) * num_counts)))
    least_us = [min(instance.durations_us[op][1:]) for op in order]
    step_us = sum(least_us) / num_cuts
    cuts, done_us = [0], 0.0
    for position, us in enumerate(least_us, 1):
        done_us += us
        if done_us >= step_us * len(cuts) and position < len(order):
            cuts.append(position)
    return [*cuts, len(order)]


def _phases_from(instance: Instance, order: Sequence[int], cuts: Sequence[int], first: int, lanes: int) -> list[float]:
    """Lower bounds of the phases of this many lanes that begin at cut `first` and end at each later one."""
    width = instance.num_cores // lanes
    durations, predecessors = instance.durations_us, instance.predecessors
    depth: dict[int, float] = {}
    found: list[float] = []
    area_us = chain_us = 0.0
    for begin, end in zip(cuts[first:], cuts[first + 1 :], strict=False):
        for op in order[begin:end]:
            us, cores = durations[op][width], width
            if us == inf:  # it may not run at this width
                cores = instance.best_width[op]
                us = durations[op][cores]
            area_us += us * cores / width
            if lanes > 1:
                depth[op] = us + max([depth.get(before, 0.0) for before in predecessors[op]], default=0.0)
                chain_us = max(chain_us, depth[op])
        found.append(max(chain_us, area_us / lanes))
    return found


def _part(instance: Instance, ops: Sequence[int], begin_us: float) -> Instance:
    """Some ops of an instance, with the edges between them, in times from `begin_us` on."""
    number = {op: at for at, op in enumerate(ops)}
    return replace(
        instance,
        durations_us=[instance.durations_us[op] for op in ops],
        predecessors=[[number[o] for o in instance.predecessors[op] if o in number] for op in ops],
        successors=[[number[o] for o in instance.successors[op] if o in number] for op in ops],
        order=list(range(len(ops))),
        best_width=[instance.best_width[op] for op in ops],
        earliest_us=[max(0.0, instance.ready_us(op) - begin_us) for op in ops] if instance.earliest_us else (),
    )
