"""Coarsening: chains and bundles of small ops become one action before they are scheduled.

Waking a lane takes a few microseconds, so shorter ops should run one after another on one lane, and a search over fewer
actions is faster. Ops are merged in pairs, as long as the sum of their durations stays below a threshold, and only if
no path can lead out of the pair and back into it, so that the coarse graph has no cycle (Sarkar: "Partitioning and
Scheduling Parallel Programs for Multiprocessors", 1989, calls such groups convex)::

    a --> b      only b waits for a                 a path from a leads through b
    a --> b      b waits only for a                 a path to b leads through a
    a, b         they wait for the same ops         a path from a to b would lead through one of these, and to a
    a, b         the same ops wait for them         likewise

A plan of the coarse graph expands to one of the fine graph: each action's ops in order on its lane. If only an edge
between two actions ordered them on a core, the first op of the later one now waits for the last of the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from hocket.ir import Carried, Costs, Device, Edge, Graph, Op, Plan, waits_of
from hocket.planning.moldable.instance import durations_of

MAX_PASSES = 8


@dataclass(frozen=True)
class Coarse:
    """A graph of ops, and a smaller graph of actions that stand for groups of them."""

    fine: Graph  # the graph of ops
    graph: Graph  # the graph of actions. An action of one op is that op.
    members: tuple[tuple[str, ...], ...]  # for each action its ops by name, in order
    table_us: npt.NDArray[np.float64]  # the duration of each action (row) at each width (column) of the device
    # the earliest start of each action that waits for an arrival
    earliest_us: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def action_of(self) -> dict[str, int]:
        """The position of each op's action."""
        return {op: action for action, ops in enumerate(self.members) for op in ops}

    def expand(self, plan: Plan, apart: Mapping[int, AbstractSet[int]] | None = None) -> Plan:
        """A plan of `graph` as a plan of `fine`, as legal and no longer (without sibling threads).

        `plan` runs no actions side by side that are kept `apart`.
        """
        if len(self.graph) == len(self.fine):
            return plan
        ops = {action.name: members for action, members in zip(self.graph.ops, self.members, strict=True)}
        after: dict[str, dict[str, None]] = {}
        for before, action in (
            *((b, a) for a, others in plan.after.items() for b in others),
            *self._turns(plan, apart or {}),
        ):
            first, last = ops[action][0], ops[before][-1]
            if last not in self.fine.predecessors[first]:
                after.setdefault(first, {})[last] = None
        lanes = [replace(lane, ops=tuple(op for action in lane.ops for op in ops[action])) for lane in plan.lanes]
        return Plan(tuple(lanes), {op: tuple(others) for op, others in after.items()}, plan.planner)

    def _turns(self, plan: Plan, apart: Mapping[int, AbstractSet[int]]) -> Iterable[tuple[str, str]]:
        """Pairs of actions on different lanes that may only be ordered by an edge of the coarse graph.

        Such an edge is between some ops of the two actions, and their other ops might overlap.
        """
        lane_of = plan.lane_of
        if any(lane.kind == "cores" and lane.width != len(lane.cores) for lane in plan.lanes):
            # Which lanes share cores depends on the machine, so every edge between lanes is kept.
            for action, others in self.graph.predecessors.items():
                yield from ((other, action) for other in others if lane_of[other] is not lane_of[action])
            return
        last: dict[tuple[str, int], str] = {}
        names = [action.name for action in self.graph.ops]
        done: set[str] = set()
        for action in TopologicalSorter(waits_of(self.graph, plan)).static_order():
            for other in apart.get(self.graph.index[action], ()):
                if names[other] in done and lane_of[names[other]] is not lane_of[action]:
                    yield names[other], action
            done.add(action)
            lane = lane_of[action]
            for core in lane.cores:
                before = last.get((lane.device, core), action)
                if lane_of[before] is not lane:
                    yield before, action
                last[lane.device, core] = action


def coarsen(
    graph: Graph, costs: Costs, device: Device, below_us: float, earliest_us: Mapping[str, float] | None = None
) -> Coarse:
    """Merge ops into actions that take less than `below_us` on `device`, each op at its best width.

    Nothing is merged if `below_us` is 0. Transfers (``recv`` and ``send``) are never merged, nor ops that wait for
    different arrivals (`earliest_us`) or may run at different widths.
    """
    table = durations_of(graph, costs, device)
    place = {name: position for position, name in enumerate(graph.order)}
    earliest_us = earliest_us or {}
    clusters = _Clusters(graph, table, below_us, earliest_us)
    if below_us > 0:
        clusters.merge(place)
    groups = [sorted(group, key=lambda op: place[graph.ops[op].name]) for group in clusters.groups()]
    if len(groups) == len(graph):
        return Coarse(graph, graph, tuple((op.name,) for op in graph.ops), table, earliest_us)
    groups.sort(key=lambda group: group[0])
    members = tuple(tuple(graph.ops[op].name for op in group) for group in groups)
    coarse_table = np.array([table[group].sum(axis=0) for group in groups])
    made = _coarse_graph(graph, groups, table)
    firsts = zip(made.ops, members, strict=True)
    waiting = {action.name: earliest_us[ops[0]] for action, ops in firsts if ops[0] in earliest_us}
    return Coarse(graph, made, members, coarse_table, waiting)


class _Clusters:
    """Clusters of ops while they are merged, each identified by one of its ops."""

    def __init__(
        self, graph: Graph, table: npt.NDArray[np.float64], below_us: float, earliest_us: Mapping[str, float]
    ) -> None:
        index = graph.index
        least_us = table[:, 1:].min(axis=1).tolist() if len(graph) else []
        self._widths = [row.tobytes() for row in np.isfinite(table)]
        self._below_us = below_us
        self._size_us = list(least_us)
        self._members = {op: [op] for op in range(len(graph))}
        self._before = [{index[name] for name in graph.predecessors[op.name]} for op in graph.ops]
        self._after = [{index[name] for name in graph.successors[op.name]} for op in graph.ops]
        self._small = [
            op.role not in ("recv", "send") and us < below_us for op, us in zip(graph.ops, least_us, strict=True)
        ]
        self._names = [op.name for op in graph.ops]
        self._earliest_us = [earliest_us.get(name, 0.0) for name in self._names]

    def groups(self) -> list[list[int]]:
        return list(self._members.values())

    def merge(self, place: dict[str, int]) -> None:
        """Merge until no pair can be merged."""
        for _ in range(MAX_PASSES):
            count = len(self._members)
            order = sorted(self._members, key=lambda op: place[self._names[op]])
            self._merge_chains(order)
            for neighbours in (self._before, self._after):
                self._merge_alike([op for op in order if op in self._members], neighbours.__getitem__)
            if len(self._members) == count:
                return

    def _merge_chains(self, order: Sequence[int]) -> None:
        for op in order:
            while op in self._members and self._small[op] and len(self._after[op]) == 1:
                (after,) = self._after[op]
                if not self._fit(op, after):
                    break
                self._join(op, after)
                op = after
            if op in self._members and self._small[op] and len(self._before[op]) == 1:
                (before,) = self._before[op]
                if self._fit(before, op):
                    self._join(op, before)

    def _merge_alike(self, order: Sequence[int], neighbours: Callable[[int], set[int]]) -> None:
        alike: dict[frozenset[int], list[int]] = {}
        for op in order:
            if self._small[op]:
                alike.setdefault(frozenset(neighbours(op)), []).append(op)
        for group in alike.values():
            into = group[0]
            for op in group[1:]:
                if self._fit(op, into):
                    self._join(op, into)
                else:
                    into = op

    def _fit(self, one: int, other: int) -> bool:
        both_us = self._size_us[one] + self._size_us[other]
        together = self._earliest_us[one] == self._earliest_us[other] and self._widths[one] == self._widths[other]
        return together and self._small[one] and self._small[other] and both_us < self._below_us

    def _join(self, op: int, into: int) -> None:
        """Add the cluster `op` to the cluster `into`."""
        self._members[into] += self._members.pop(op)
        self._size_us[into] += self._size_us[op]
        for mine, theirs in ((self._before, self._after), (self._after, self._before)):
            for other in mine[op]:
                theirs[other].discard(op)
                if other != into:
                    theirs[other].add(into)
                    mine[into].add(other)
            mine[into].discard(into)


def _coarse_graph(graph: Graph, groups: Sequence[Sequence[int]], table: npt.NDArray[np.float64]) -> Graph:
    names = {op.name for op in graph.ops}
    ops = []
    action_of: dict[str, str] = {}
    for group in groups:
        described = graph.ops[max(group, key=lambda op: table[op, 1:].min())]
        if len(group) > 1:
            name = f"{graph.ops[group[0]].name}+{len(group) - 1}"
            while name in names:
                name += "+"
            names.add(name)
            described = Op(
                name=name,
                target=described.target,
                role=described.role,
                layer=described.layer,
                flops=sum(graph.ops[op].flops for op in group),
                size_bytes=sum(graph.ops[op].size_bytes for op in group),
                stateless=all(graph.ops[op].stateless for op in group),
            )
        ops.append(described)
        action_of |= {graph.ops[op].name: described.name for op in group}
    size_bytes: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        pair = action_of[edge.src], action_of[edge.dst]
        if pair[0] != pair[1]:
            size_bytes[pair] = size_bytes.get(pair, 0.0) + edge.size_bytes
    carried = dict.fromkeys(Carried(action_of[pair.src], action_of[pair.dst]) for pair in graph.carried)
    return Graph(tuple(ops), tuple(Edge(*pair, size) for pair, size in size_bytes.items()), tuple(carried))
