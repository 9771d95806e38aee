r"""The critical-path plan on CPU lanes: one set of cores for each stream, or lanes that take turns on all cores.

A core has no priorities, so the order of starts replaces the priority of streams on a GPU. There are three kinds of
plans, each with several widths or orders, and simulation chooses:

- one lane for each stream, on disjoint cores, where the critical path has all cores but one for each other lane::

      core 0   activation 0   [ conv1 ][ conv2 ][ dA2 ][ dRelu1 ]
      core 1   weight 0                         [ dW2 ][ u2 ][ dW1 ][ u1 ]

- any cores for the ready op of the highest priority (`moldable.sgs.parallel_sgs`). Lanes that share a core
  take turns through `Plan.after`::

      core 0   [ conv1       ][ conv2      ][ dA2 ][ dRelu1 ][ dW1 ]
      core 1   [             ][            ][ dW2 ][ u2 ]    [ dB1 ]

- phases of one wide lane and of narrow ones in turn (`hocket.planning.phases`), from the order of streams (every
  gradient of a parameter right behind the ops that it waits for), from program order, or by the longest paths.

The serial plan is always a candidate, so the result is never longer, as far as the costs are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hocket.ir import Costs, Device, Graph, Lane, Machine, Plan
from hocket.planning.channels import by_earliest
from hocket.planning.critical_path.streams import Streams, streams_of
from hocket.planning.moldable.instance import Instance, as_plan, instance_of
from hocket.planning.moldable.sgs import parallel_sgs
from hocket.planning.phases import SWITCH_US, in_phases
from hocket.planning.serial import Serial


def core_plans(
    graph: Graph,
    costs: Costs,
    device: Device,
    streams: Streams,
    wait_us: float,
    earliest_us: Mapping[str, float],
    *,
    keep_order: bool,
) -> Iterator[tuple[Plan, Sequence[str]]]:
    """Plans to choose from, each with an order of all ops that its lanes keep.

    The streams are made from durations at full width. With `keep_order` only plans are yielded that depend on their
    order.
    """
    if not keep_order:
        serial = Serial().compute_plan(graph, costs, Machine((device,)), earliest_us)
        yield serial, by_earliest(graph, earliest_us)
    if device.cores == 1:
        return
    instance = instance_of(graph, costs, device, earliest_us, wait_us)
    yield _own_cores(graph, instance, device, streams.order), streams.order
    place = {op: at for at, op in enumerate(streams.order)}
    first = [streams.priority(streams.stream_of[op.name]) * len(graph) - place[op.name] for op in graph.ops]
    backbone = set(streams.backbone.ops)
    names = [op.name for op in graph.ops]
    best = instance.best_width
    widths = [list(best)]
    number = {name: op for op, name in enumerate(names)}
    orders = [[number[name] for name in streams.order]]
    if not keep_order:
        widths += [
            [width if name in backbone else 1 for name, width in zip(names, best, strict=True)],
            [max(1, device.cores // 2)] * len(names),
            [1] * len(names),
        ]
        ranks = instance.ranks_at_us([device.cores] * len(names))
        orders += [list(instance.order), sorted(instance.order, key=lambda op: (-ranks[op], place[names[op]]))]
    turn = {op: at for at, op in enumerate(graph.order)}  # ops that take no time have this order in a plan, too
    packed = [parallel_sgs(instance, of_ops, first) for of_ops in map(instance.usable, widths)]
    packed += [in_phases(instance, sorted(of, key=instance.ready_us), SWITCH_US) for of in orders]
    for placed in packed:
        by_start = sorted(placed, key=lambda p: (p.start_us, p.end_us, turn[names[p.op]]))
        yield as_plan(graph, placed, device, "critical-path"), [names[p.op] for p in by_start]


def switches_us(plan: Plan) -> float:
    """Total time of changes between lanes of different width on the same cores, which a simulation leaves out."""
    turns = 0
    for op, others in plan.after.items():
        mine = plan.lane_of[op]
        turns += any(
            plan.lane_of[other].width != mine.width and not {*plan.lane_of[other].cores}.isdisjoint(mine.cores)
            for other in others
        )
    return turns * SWITCH_US


def _own_cores(graph: Graph, instance: Instance, device: Device, order: Sequence[str]) -> Plan:
    """A lane for each stream on cores of its own, with at most as many streams as cores."""
    widths = instance.usable([device.cores] * len(graph))
    rows = zip(graph.ops, instance.durations_us, widths, strict=True)
    durations = {op.name: of_op[width] for op, of_op, width in rows}
    streams = replace(streams_of(graph, durations, min(device.cores, 8)), order=tuple(order))
    lanes, begin = [], 0
    found = streams.lanes()
    for number, ((task, rank), ops) in enumerate(found.items()):
        width = device.cores - len(found) + 1 if number == 0 else 1
        cores = tuple(range(begin, begin + width))
        begin += width
        lanes.append(Lane(f"{device.name}.{task}{rank}", tuple(ops), "cores", device.name, width, cores))
    return Plan(tuple(lanes), planner="critical-path")
