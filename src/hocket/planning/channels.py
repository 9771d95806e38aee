r"""Transfers (`recv` and `send` ops) and the channels that carry them.

An op of the role ``recv`` or ``send`` is a transfer if a link leads into (out of) a device of the machine, or if its
costs name no device. With a cost for cores and no link it is an op like any other. Transfers go to lanes of kind
``channel``: whenever a channel is free, it carries the most urgent transfer that is ready::

    backward   [ dW3 ][ dW2 ][ dW1 ]
    channel            [====== 3 ======][ 1 ][ 2 ]        2 was ready before 1, and yields

TurboDL orders gradients in this way (section 3.3, "Extension to Multiple GPUs": by the distance to their use), and
TicTac parameters (`hocket.planning.transfers`), with different urgencies. A simulation of all other ops gives the times
at which transfers are ready. A transfer goes only after all ops that it waits for, directly or by way of lanes, so that
lanes never wait for each other in a circle.

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
from heapq import heapify, heappop, heappush

from hocket.errors import InputError
from hocket.ir import Costs, Edge, Graph, Lane, Link, Machine, Op, Plan, launch_order, waits_of
from hocket.simulation import simulate
from hocket.simulation.durations import transfer_us

# Lanes for a link that never queues.
MAX_CHANNELS = 8

ROLES = ("send", "recv")


def transfers_of(graph: Graph, costs: Costs, machine: Machine) -> tuple[str, ...]:
    """The ops of `graph` that go over links, in its order of ops."""
    return tuple(op.name for op in graph.ops if op.role in ROLES and _is_wired(op, costs, machine))


def _is_wired(op: Op, costs: Costs, machine: Machine) -> bool:
    row = costs.durations_us.get(op.name)
    return row is None or all("->" in key for key in row) or bool(_towards(op, machine))


def _towards(op: Op, machine: Machine) -> list[Link]:
    """The links that lead where a transfer goes: into a device of the machine, or out of one."""
    return [link for link in machine.links if (link.src if op.role == "send" else link.dst) in machine.by_name]


def without_transfers(graph: Graph, transfers: Collection[str]) -> Graph:
    """The graph without `transfers`: ops that waited for a transfer wait for the ops that it waited for."""
    if not transfers:
        return graph
    names = graph.by_name.keys() - set(transfers)
    behind: dict[str, dict[str, None]] = {}  # for each transfer the ops that it waits for
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
    ops = tuple(op for op in graph.ops if op.name in names)
    return Graph(ops, tuple(edges.values()), carried, graph.buffers)


def links_of(graph: Graph, transfers: Sequence[str], costs: Costs, machine: Machine) -> dict[str, Link]:
    """A link for each transfer, which its costs name or which is the least loaded there, or an `InputError`."""
    load: dict[Link, float] = {}
    found = {}
    for name in transfers:
        op = graph[name]
        row = costs.durations_us.get(name, {})
        able = [link for link in machine.links if link.channel in row] or _towards(op, machine)
        if not able:
            way = "from" if op.role == "send" else "to"
            devices = " or ".join(repr(device) for device in machine.by_name)
            raise InputError(f"machine: op {name!r} is a {op.role}, and no link leads {way} {devices}")
        link = min(able, key=lambda link: load.get(link, 0.0))
        load[link] = load.get(link, 0.0) + transfer_us(op, link, costs)
        found[name] = link
    return found


def channel_lanes(
    graph: Graph, plan: Plan, ends_us: Mapping[str, float], costs: Costs, machine: Machine, urgency: Mapping[str, float]
) -> tuple[Lane, ...]:
    """Lanes for all transfers of `graph`, which are the ops that `plan` does not run.

    The other ops end at `ends_us`. The transfer with the lowest number in `urgency` goes first, and those without a
    number last.
    """
    transfers = [op.name for op in graph.ops if op.name not in plan.lane_of]
    link_of = links_of(graph, transfers, costs, machine)
    place = {name: at for at, name in enumerate(transfers)}
    behind = _before(graph, plan, place)
    queues = {link: _Queue(link, list(link_of.values()).count(link)) for link in dict.fromkeys(link_of.values())}
    end_us = dict(ends_us)
    left = (1 << len(transfers)) - 1
    blocked: dict[int, list[str]] = {}  # by one of the transfers that these have to wait for

    def admit(name: str) -> None:
        before = behind[name] & left
        if before:
            blocked.setdefault(before.bit_length() - 1, []).append(name)
            return
        ready_us = max([end_us.get(other, 0.0) for other in graph.predecessors[name]], default=0.0)
        queues[link_of[name]].add(ready_us, (urgency.get(name, float("inf")), place[name], name))

    for name in transfers:
        admit(name)
    while left:
        queue = min(queues.values(), key=lambda queue: queue.next_us)
        name = queue.pop(lambda name: transfer_us(graph[name], link_of[name], costs), end_us)
        left &= ~(1 << place[name])
        for other in blocked.pop(place[name], ()):
            admit(other)
    return tuple(
        Lane(f"{link.src}.{link.dst}.{number}", tuple(ops), "channel", link.channel)
        for link, queue in queues.items()
        for number, ops in enumerate(queue.channels)
        if ops
    )


class _Queue:
    """The transfers of a link, and the times at which its channels are free."""

    def __init__(self, link: Link, count: int) -> None:
        self.channels: list[list[str]] = [[] for _ in range(min(link.channels or MAX_CHANNELS, count))]
        self._free = [(0.0, number) for number in range(len(self.channels))]
        self._later: list[tuple[float, tuple[float, int, str]]] = []  # ready from when on
        self._ready: list[tuple[float, int, str]] = []  # the most urgent first
        heapify(self._free)

    @property
    def next_us(self) -> float:
        """The start of the next transfer, infinity if there is none."""
        if self._ready:
            return self._free[0][0]
        return max(self._free[0][0], self._later[0][0]) if self._later else float("inf")

    def add(self, ready_us: float, entry: tuple[float, int, str]) -> None:
        heappush(self._later, (ready_us, entry))

    def pop(self, lasts_us: Callable[[str], float], end_us: dict[str, float]) -> str:
        """Begin the most urgent transfer that can begin at `next_us`, and note its end."""
        now_us = self.next_us
        while self._later and self._later[0][0] <= now_us:
            heappush(self._ready, heappop(self._later)[1])
        name = heappop(self._ready)[2]
        _, channel = heappop(self._free)
        end_us[name] = now_us + lasts_us(name)
        heappush(self._free, (end_us[name], channel))
        self.channels[channel].append(name)
        return name


def _before(graph: Graph, plan: Plan, place: Mapping[str, int]) -> dict[str, int]:
    """For each transfer the set of transfers that must go before it, by edges, `after` and lanes."""
    # A transfer that is alone on its lane waits for no lane, so this plan has an order.
    alone = Plan((*plan.lanes, *(Lane(f"transfer{at}", (name,)) for name, at in place.items())), plan.after)
    waits = waits_of(graph, alone)
    found: dict[str, int] = {}
    for name in launch_order(graph, alone):
        mine = 0
        for before in waits[name]:
            mine |= found[before] | (1 << place[before] if before in place else 0)
        found[name] = mine
    return {name: found[name] for name in place}


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

    The most urgent has the lowest number. `compute_planner` plans the other ops, given their earliest starts.
    """
    arrived = arrivals_us(graph, roots_of(graph, transfers), costs, machine, urgency)
    compute = without_transfers(graph, transfers)
    earliest = {name: us for name, us in earliest_us(graph, arrived).items() if name in compute.by_name}
    made = compute_planner(compute, costs, machine, earliest)
    ends_us = {span.op: span.end_us for span in simulate(compute, made, costs, machine, earliest_us=earliest).spans}
    lanes = channel_lanes(graph, made, ends_us, costs, machine, urgency)
    return replace(made, lanes=(*made.lanes, *lanes))
