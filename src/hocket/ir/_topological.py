"""Topological orders that take the first of the ready nodes by a key, and sets of nodes that are joined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

Node = TypeVar("Node", bound=Hashable)


class Named(Protocol):
    """Anything with a name, such as an op."""

    @property
    def name(self) -> str: ...


def list_order(
    waiting: dict[Node, int], followers: Mapping[Node, Iterable[Node]], key: Callable[[Node], Any]
) -> Iterator[Node]:
    """Yield nodes so that each comes after those that it waits for: of the ready ones always the least by `key`.

    `waiting` counts for each node those that it waits for, and is used up. `followers` are the nodes that wait for it.
    Nodes on a cycle, and those behind one, are left out.
    """
    ready = [(key(node), node) for node, count in waiting.items() if not count]
    heapify(ready)
    while ready:
        node = heappop(ready)[1]
        yield node
        for after in followers[node]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (key(after), after))


def topological(
    ops: Sequence[Named], predecessors: Mapping[str, Sequence[str]], successors: Mapping[str, Sequence[str]]
) -> list[str]:
    """The names of `ops`, in an order that departs from theirs only where an edge demands it.

    An op is emitted at its own position unless a predecessor that stands later has to come before it. Ops on a cycle,
    and those behind one, are left out.
    """
    position = {op.name: index for index, op in enumerate(ops)}
    if all(position[before] < position[op.name] for op in ops for before in predecessors[op.name]):
        return [op.name for op in ops]
    waiting = {op.name: len(predecessors[op.name]) for op in ops}
    return list(list_order(waiting, successors, position.__getitem__))


class DisjointSets(Generic[Node]):
    """Disjoint sets of nodes, each known by its first one. At the beginning each node is alone."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._above = {node: node for node in nodes}

    def first_of(self, node: Node) -> Node:
        """The first node of the set that a node is in."""
        while self._above[node] != node:
            self._above[node] = node = self._above[self._above[node]]
        return node

    def join(self, one: Node, other: Node) -> None:
        """Make the sets of two nodes one, which the first of `one` stands for."""
        self._above[self.first_of(other)] = self.first_of(one)

    def groups(self) -> list[list[Node]]:
        """The nodes of each set, in the order in which they were given."""
        found: dict[Node, list[Node]] = {}
        for node in self._above:
            found.setdefault(self.first_of(node), []).append(node)
        return list(found.values())
