r"""The waits that a plan needs, and the order in which to launch its ops.

A lane runs its ops in order, so an op needs a wait only where an edge crosses lanes, and not even there if an earlier
wait implies it. Vector clocks decide that (Fidge 1988, Mattern 1989): for each op, the number of ops of every lane that
have finished when it ends::

    lane 0   a ------- c ------- e        e waits for d, and d came after b: no wait of e for b
              \                 /
    lane 1     b ------------- d          d follows b on its lane: no wait at all

Executors, the simulator and the hazard checker take the waits from here, so that they all use the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hocket.ir._topological import list_order
from hocket.ir.graph import Graph
from hocket.ir.plan import Plan
from hocket.ir.semantics import check_ops, execution_order, waits_of


@dataclass(frozen=True)
class Synchronisation:
    """The waits that a plan needs, and the order that they enforce."""

    # op -> ops on other lanes that it has to wait for, without those that another wait implies
    waits: dict[str, tuple[str, ...]]
    clocks: dict[str, tuple[int, ...]]  # op -> the number of ops of each lane that are finished when it ends
    place: dict[str, tuple[int, int]]  # op -> (lane, position on it)

    def before(self, first: str, second: str) -> bool:
        """Return True if `first` has always finished when `second` ends. An op counts as before itself."""
        lane, position = self.place[first]
        return self.clocks[second][lane] > position

    def last_of(self, ops: Iterable[str]) -> str | None:
        """The one of `ops` that always ends after all the others, if there is one."""
        found = list(ops)
        last = max(found, key=lambda op: sum(self.clocks[op]))
        return last if all(self.before(op, last) for op in found) else None


def synchronisation(graph: Graph, plan: Plan) -> Synchronisation:
    """Work out the waits of a plan.

    Raises:
        PlanError: the plan does not run every op of the graph once, or its lanes wait for each other in a circle.
    """
    place = {op: (number, at) for number, lane in enumerate(plan.lanes) for at, op in enumerate(lane.ops)}
    check_ops(graph, plan)
    current = [(0,) * len(plan.lanes)] * len(plan.lanes)
    clocks: dict[str, tuple[int, ...]] = {}
    waits: dict[str, tuple[str, ...]] = {}
    for name in execution_order(graph, plan):
        number, position = place[name]
        needed = (*graph.predecessors[name], *plan.after.get(name, ()))
        clock = current[number]
        waited: list[str] = []
        # Latest first, so that one wait may imply the others.
        for before in sorted(needed, key=lambda op: sum(clocks[op]), reverse=True):
            other, reached = place[before]
            if other != number and clock[other] <= reached:
                waited.append(before)
                clock = tuple(map(max, clock, clocks[before]))
        current[number] = clocks[name] = (*clock[:number], position + 1, *clock[number + 1 :])
        if waited:
            waits[name] = tuple(waited)
    return Synchronisation(waits, clocks, place)


def launch_order(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The order in which one host thread launches the ops of all lanes, so that no lane waits for it without need.

    An op's level is one more than that of the last thing it waits for, its lane's previous op included. Ops go by
    level, and within a level by the place of their lane in the plan.
    """
    check_ops(graph, plan)
    rank = {op: (number, at) for number, lane in enumerate(plan.lanes) for at, op in enumerate(lane.ops)}
    needed = {op: set(others) for op, others in waits_of(graph, plan).items()}
    followers: dict[str, list[str]] = {name: [] for name in needed}
    for name, others in needed.items():
        for before in others:
            followers[before].append(name)
    level: dict[str, int] = {}

    def key(name: str) -> tuple[int, tuple[int, int]]:
        level[name] = 1 + max((level[before] for before in needed[name]), default=-1)
        return level[name], rank[name]

    order = tuple(list_order({name: len(before) for name, before in needed.items()}, followers, key))
    return order if len(order) == len(plan) else execution_order(graph, plan)  # which names the circle
