r"""When ops can start at the earliest, because what they need is still on the wire.

A step that is fed over links begins with `recv` ops that wait for nothing. Once their order on each link is decided,
so is when each of them has arrived; an op can start when the last of all that it depends on has::

    link        [ recv a ][ recv b ][    recv c    ]
    earliest              |         |              |
                          f1(a)     f2(f1, b)      f3(f2, c)

`plan_around` makes a plan of a graph with transfers out of any planner for ops that compute: these are planned for
their earliest starts, and channels are added for what is received and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.channels import channel_lanes, without_transfers
from hocket.simulation import simulate

ComputePlanner = Callable[[Graph, Costs, Machine, Mapping[str, float]], Plan]


def first_use(graph: Graph, transfers: Sequence[str]) -> dict[str, float]:
    """For each transfer its place in the order in which their results are first used; one never used comes last.

    The layer-by-layer order of earlier systems (Cui et al., SoCC 2014). What a `send` is needed for is the next step,
    so those that nothing in this step waits for keep the order of the graph.
    """
    place = {name: at for at, name in enumerate(graph.order)}
    used = {name: min([place[after] for after in graph.successors[name]], default=len(place)) for name in transfers}
    ordered = sorted(transfers, key=lambda name: (used[name], place[name]))
    return {name: float(at) for at, name in enumerate(ordered)}


def roots_of(graph: Graph, transfers: Collection[str]) -> tuple[str, ...]:
    """The transfers that wait for nothing in the step: its parameters."""
    return tuple(name for name in transfers if graph[name].role == "recv" and not graph.predecessors[name])


def arrivals_us(
    graph: Graph, roots: Sequence[str], costs: Costs, machine: Machine, urgency: Mapping[str, float]
) -> dict[str, float]:
    """When each of the `roots` has arrived, if links carry the most urgent first and nothing else."""
    alone = Graph(tuple(graph[name] for name in roots))
    lanes = channel_lanes(alone, Plan(()), {}, costs, machine, urgency)
    timeline = simulate(alone, Plan(lanes), costs, machine)
    return {span.op: span.end_us for span in timeline.spans}


def earliest_us(graph: Graph, arrived_us: Mapping[str, float]) -> dict[str, float]:
    """For each op that depends on an arrival when the last of those is there."""
    found: dict[str, float] = {}
    for name in graph.order:
        us = max([found.get(before, 0.0) for before in graph.predecessors[name]], default=arrived_us.get(name, 0.0))
        if us > 0.0:
            found[name] = us
    return found


def by_earliest(graph: Graph, earliest: Mapping[str, float]) -> tuple[str, ...]:
    """The ops in the order in which they can start, those of one instant in `Graph.order`; it respects every edge."""
    if not earliest:
        return graph.order
    return tuple(sorted(graph.order, key=lambda name: earliest.get(name, 0.0)))


def plan_around(
    graph: Graph,
    transfers: Sequence[str],
    costs: Costs,
    machine: Machine,
    urgency: Mapping[str, float],
    compute_planner: ComputePlanner,
) -> Plan:
    """A plan of `graph` whose transfers go over channels, the most urgent first.

    Args:
        graph: one step.
        transfers: those of its ops that go over links.
        costs: what ops take.
        machine: what they run on.
        urgency: of each transfer; the lowest number goes first.
        compute_planner: plans the other ops, given when each can start at the earliest.

    Raises:
        InputError: no link leads where a transfer goes, or the planner's own.
    """
    arrived = arrivals_us(graph, roots_of(graph, transfers), costs, machine, urgency)
    compute = without_transfers(graph, transfers)
    earliest = {name: us for name, us in earliest_us(graph, arrived).items() if name in compute.by_name}
    made = compute_planner(compute, costs, machine, earliest)
    ends_us = {span.op: span.end_us for span in simulate(compute, made, costs, machine, earliest_us=earliest).spans}
    lanes = channel_lanes(graph, made, ends_us, costs, machine, urgency)
    return replace(made, lanes=(*made.lanes, *lanes))
