r"""Earliest starts of ops that depend on transfers.

A step that is fed over links begins with `recv` ops that wait for nothing. Their order on each link decides when each
of them arrives, and an op can start when all recvs that it depends on have arrived::

    link        [ recv a ][ recv b ][    recv c    ]
    earliest              |         |              |
                          f1(a)     f2(f1, b)      f3(f2, c)

`plan_around` extends any planner of ops that compute to graphs with transfers: it plans these ops for their earliest
starts, and adds channels for the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.channels import channel_lanes, without_transfers
from hocket.simulation import simulate

ComputePlanner = Callable[[Graph, Costs, Machine, Mapping[str, float]], Plan]


def first_use(graph: Graph, transfers: Sequence[str]) -> dict[str, float]:
    """The place of each transfer in the order of first use of their results. Results that no op uses come last.

    The layer-by-layer order of earlier systems (Cui et al., SoCC 2014). A `send` is needed by the next step, so those
    that no op of this step waits for keep the order of the graph.
    """
    place = {name: at for at, name in enumerate(graph.order)}
    used = {name: min([place[after] for after in graph.successors[name]], default=len(place)) for name in transfers}
    ordered = sorted(transfers, key=lambda name: (used[name], place[name]))
    return {name: float(at) for at, name in enumerate(ordered)}


def roots_of(graph: Graph, transfers: Collection[str]) -> tuple[str, ...]:
    """The recvs that wait for no op of the step: its parameters."""
    return tuple(name for name in transfers if graph[name].role == "recv" and not graph.predecessors[name])


def arrivals_us(
    graph: Graph, roots: Sequence[str], costs: Costs, machine: Machine, urgency: Mapping[str, float]
) -> dict[str, float]:
    """The arrival of each of the `roots`, if links carry only these, the most urgent first."""
    alone = Graph(tuple(graph[name] for name in roots))
    lanes = channel_lanes(alone, Plan(()), {}, costs, machine, urgency)
    timeline = simulate(alone, Plan(lanes), costs, machine)
    return {span.op: span.end_us for span in timeline.spans}


def earliest_us(graph: Graph, arrived_us: Mapping[str, float]) -> dict[str, float]:
    """The earliest start of each op that depends on an arrival: the last of its arrivals."""
    found: dict[str, float] = {}
    for name in graph.order:
        us = max([found.get(before, 0.0) for before in graph.predecessors[name]], default=arrived_us.get(name, 0.0))
        if us > 0.0:
            found[name] = us
    return found


def by_earliest(graph: Graph, earliest: Mapping[str, float]) -> tuple[str, ...]:
    """The ops by their earliest start, and among equals by `Graph.order`. This order respects every edge."""
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
    """Plan `graph` with its transfers on channels, the most urgent first.

    Args:
        graph: one step.
        transfers: those of its ops that go over links.
        costs: the durations of ops.
        machine: its devices and links.
        urgency: of each transfer. The lowest number goes first.
        compute_planner: plans the other ops, given their earliest starts.

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
