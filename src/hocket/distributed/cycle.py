r"""`Cycle`: a worker and all servers as one graph, to predict the time of a step in a row of steps.

A pull of the next step begins when the last op of this one that reads the parameter is done *and* the server has
updated it. These are the carried edges of the joined graph::

    worker   [ pull w ] --> forward --> backward --> [ push w.grad ] --.
    server                                                             '--> update of w --.
    carried       ^------------- last reader -----------------'                           |
                  ^-----------------------------------------------------------------------'

Servers are assumed to compute as fast as the worker on separate cores, and all workers to be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hocket.distributed.parts import Assignment, server_name, server_part
from hocket.ir import Carried, Costs, Edge, Graph, Lane, Machine, Plan
from hocket.planning.channels import first_use
from hocket.planning.transfers.repeating import in_order_of_readiness
from hocket.simulation.engine import step_us
from hocket.tracing.captured import Captured


@dataclass(frozen=True)
class Cycle:
    """A worker's step, and the servers' work between two steps.

    Attributes:
        graph: graph of both.
        updates: for each server the names of its ops.
        pulls: names of the ops that bring parameters to the worker.
        costs: costs of all ops.
        machine: the worker's machine, with its links.
    """

    graph: Graph
    updates: tuple[frozenset[str], ...]
    pulls: frozenset[str]
    costs: Costs
    machine: Machine

    def step_us(self, workers_plan: Plan) -> float:
        """The predicted time of a step in a row of steps."""
        return step_us(self.graph, self._with_servers(workers_plan), self.costs, self.machine)

    def by_readiness(self, workers_plan: Plan) -> Plan:
        """The plan with pulls in the order of a server that always sends the most urgent value that is ready."""
        lanes = [lane.name for lane in workers_plan.lanes if not self.pulls.isdisjoint(lane.ops)]
        urgency = first_use(self.graph, [name for name in self.graph.order if name in self.pulls])
        row = self._with_servers(workers_plan)
        made = in_order_of_readiness(self.graph, row, self.costs, self.machine, lanes, urgency)
        return replace(workers_plan, lanes=made.lanes[: len(workers_plan.lanes)])

    def _with_servers(self, workers_plan: Plan) -> Plan:
        pushes = [op for lane in workers_plan.lanes if lane.kind == "channel" for op in lane.ops]
        device = self.machine.devices[0].name
        lanes = list(workers_plan.lanes)
        for number, mine in enumerate(self.updates):
            ops = in_order_of_arrival(self.graph, mine, pushes)
            # A stream: lanes of cores are threads of the worker, which wait for each other at the end of its step.
            lanes += [Lane(f"{server_name(number)}.updates", ops, "stream", device)] if ops else []
        return replace(workers_plan, lanes=tuple(lanes))


def cycle_of(captured: Captured, part: Captured, assignment: Assignment, costs: Costs, machine: Machine) -> Cycle:
    """Join the part of a worker with those of the servers. `costs` are those of all ops and transfers."""
    pulls = frozenset(each.name for each in assignment.pulls)
    ops, edges, carried = list(part.graph.ops), list(part.graph.edges), list(part.graph.carried)
    for number in range(len(assignment.server_ops)):
        served = server_part(captured, assignment, number).graph
        ops += [op for op in served.ops if op.name in assignment.server_ops[number]]
        for edge in served.edges:
            if edge.dst in pulls:
                carried.append(Carried(edge.src, edge.dst))
            else:
                edges.append(edge)
        for src, dst in served.carried:
            if src in pulls:
                edges.append(Edge(src, dst))
            elif dst not in part.graph.by_name:
                carried.append(Carried(src, dst))
    graph = Graph(
        tuple(replace(op, reads=(), writes=()) for op in ops),
        tuple({(edge.src, edge.dst): edge for edge in edges}.values()),
        tuple(dict.fromkeys(carried)),
    )
    return Cycle(graph, assignment.server_ops, pulls, costs, machine)


def in_order_of_arrival(graph: Graph, ops: Iterable[str], arrivals: Sequence[str]) -> tuple[str, ...]:
    """Sort ops by the last of `arrivals` that each waits for. Ops that wait for none come first."""
    place = {name: at for at, name in enumerate(arrivals)}
    wanted = frozenset(ops)
    last: dict[str, int] = {}
    for name in graph.order:
        if name in wanted:
            last[name] = max(
                [max(last.get(before, -1), place.get(before, -1)) for before in graph.predecessors[name]], default=-1
            )
    return tuple(sorted(last, key=last.__getitem__))
