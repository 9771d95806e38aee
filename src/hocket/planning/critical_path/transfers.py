r"""Transfers: the gradients that go to other machines, the one that is needed first goes first.

With several GPUs or a parameter server the update of a layer waits for the wire as well (TurboDL, section 3.3,
"Extension to Multiple GPUs"): a gradient is sent as soon as it is there, beside the rest of the backward, and "when the
reuse distance of a gradient is shorter, the communication stream for sending this gradient can be assigned with a
higher priority". The backward makes the gradient of the last layer first, the next forward wants that of the first
layer first; so whenever a channel is free, the transfer goes out that is ready and has the shortest dependency
distance::

    backward   [ dW3 ][ dW2 ][ dW1 ]
    channel            [====== 3 ======][ 1 ][ 2 ]        2 was ready before 1, and yields

When ops are ready comes from a simulation of everything but the transfers. Updates then stand behind all gradients on
their stream, so that none of these waits for the wire. An order that would let lanes wait for each
other in a circle is never chosen: a transfer goes only after all that it waits for, by way of lanes, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from hocket.errors import InputError
from hocket.ir import Costs, Edge, Graph, Lane, Link, Machine, Plan, launch_order

__all__ = ["MAX_CHANNELS", "channel_lanes", "without_transfers"]

# Lanes for a link that never queues.
MAX_CHANNELS = 8

_TRANSFERS = ("send", "recv")


def without_transfers(graph: Graph) -> Graph:
    """The graph's other ops, and the edges between them; what waited for a transfer waits for what that waited for."""
    ops = tuple(op for op in graph.ops if op.role not in _TRANSFERS)
    if len(ops) == len(graph):
        return graph
    names = {op.name for op in ops}
    behind: dict[str, dict[str, None]] = {}  # for each transfer the ops whose results are under way
    edges = {(edge.src, edge.dst): edge for edge in graph.edges if edge.src in names and edge.dst in names}
    for name in graph.order:
        sources: dict[str, None] = {}
        for before in graph.predecessors[name]:
            sources.update(behind.get(before, {} if name in names else {before: None}))
        if name not in names:
            behind[name] = sources
        for src in sources if name in names else ():
            edges.setdefault((src, name), Edge(src, name))
    carried = tuple(pair for pair in graph.carried if pair.src in names and pair.dst in names)
    return Graph(ops, tuple(edges.values()), carried, graph.buffers)


def channel_lanes(
    graph: Graph,
    plan: Plan,
    ends_us: Mapping[str, float],
    costs: Costs,
    machine: Machine,
    device: str,
    distance: Mapping[str, float],
) -> tuple[Lane, ...]:
    """Lanes for all sends and receives of `graph`.

    Args:
        graph: one step of one worker.
        plan: the plan of everything else.
        ends_us: when each op of that plan ends.
        costs: what transfers take, where that is not what their link says.
        machine: its links out of `device` carry the sends, and those into it the receives.
        device: the device that the worker computes on.
        distance: dependency distance of each op.

    Raises:
        InputError: no link leads where a transfer goes.
    """
    transfers = [op.name for op in graph.ops if op.role in _TRANSFERS]
    link_of = _links(graph, transfers, costs, machine, device)
    place = {name: at for at, name in enumerate(transfers)}
    first = _before(graph, plan, place)
    free: dict[Link, list[tuple[float, int]]] = {}  # for each link when each of its channels is free
    queues: dict[Link, list[list[str]]] = {}
    for link in dict.fromkeys(link_of.values()):
        count = min(link.channels or MAX_CHANNELS, sum(other == link for other in link_of.values()))
        free[link] = [(0.0, channel) for channel in range(count)]
        queues[link] = [[] for _ in range(count)]
    end_us = dict(ends_us)
    left = dict.fromkeys(transfers)
    remaining = (1 << len(transfers)) - 1
    while left:
        able = [name for name in left if not first[name] & remaining]
        ready_us = {n: max([end_us.get(b, 0.0) for b in graph.predecessors[n]], default=0.0) for n in able}
        start_us = {name: max(ready_us[name], free[link_of[name]][0][0]) for name in able}
        soonest = min(start_us.values())
        name = min(
            (name for name in able if start_us[name] == soonest),
            key=lambda name: (distance.get(name, float("inf")), place[name]),
        )
        link = link_of[name]
        _, channel = heappop(free[link])
        end_us[name] = soonest + _duration_us(name, link, graph, costs)
        heappush(free[link], (end_us[name], channel))
        queues[link][channel].append(name)
        del left[name]
        remaining &= ~(1 << place[name])
    return tuple(
        Lane(f"{link.src}.{link.dst}.{number}", tuple(queue), "channel", f"{link.src}->{link.dst}")
        for link, channels in queues.items()
        for number, queue in enumerate(channels)
        if queue
    )


def _links(graph: Graph, transfers: Sequence[str], costs: Costs, machine: Machine, device: str) -> dict[str, Link]:
    """A link for each transfer: the one that its costs name, or else the one with the least to carry so far."""
    load: dict[Link, float] = {}
    found = {}
    for name in transfers:
        sends = graph[name].role == "send"
        able = [link for link in machine.links if (link.src if sends else link.dst) == device]
        row = costs.durations_us.get(name, {})
        able = [link for link in able if f"{link.src}->{link.dst}" in row] or able
        if not able:
            way = "from" if sends else "to"
            raise InputError(f"machine: op {name!r} is a {graph[name].role}, and no link leads {way} {device!r}")
        link = min(able, key=lambda link: load.get(link, 0.0))
        load[link] = load.get(link, 0.0) + _duration_us(name, link, graph, costs)
        found[name] = link
    return found


def _before(graph: Graph, plan: Plan, place: Mapping[str, int]) -> dict[str, int]:
    """For each transfer the set of transfers that must go before it, by edges, `after` and lanes."""
    waits = {name: [*graph.predecessors[name], *plan.after.get(name, ())] for name in graph.by_name}
    for lane in plan.lanes:
        for before, op in pairwise(lane.ops):
            waits[op].append(before)
    # A transfer that is alone on its lane waits for nobody else's turn, so this plan has an order.
    alone = Plan((*plan.lanes, *(Lane(f"transfer{at}", (name,)) for name, at in place.items())), plan.after)
    found: dict[str, int] = {}
    for name in launch_order(graph, alone):
        mine = 0
        for before in waits[name]:
            mine |= found[before] | (1 << place[before] if before in place else 0)
        found[name] = mine
    return {name: found[name] for name in place}


def _duration_us(name: str, link: Link, graph: Graph, costs: Costs) -> float:
    if name in costs:
        return costs.duration_us(name, device=f"{link.src}->{link.dst}")
    return link.duration_us(graph[name].size_bytes)
