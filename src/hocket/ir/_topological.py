"""A topological order of named things, and a cycle where there is none."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol


class Named(Protocol):
    """What has a name of its own."""

    @property
    def name(self) -> str: ...


def topological(
    ops: Sequence[Named], predecessors: Mapping[str, Sequence[str]], successors: Mapping[str, Sequence[str]]
) -> list[str]:
    """The names of `ops`, in an order that departs from theirs only where an edge demands it.

    An op is emitted at its own position unless a predecessor that stands later has to come before it. Ops on a cycle,
    and those behind one, are left out.
    """
    waiting = {op.name: len(predecessors[op.name]) for op in ops}
    position = {op.name: index for index, op in enumerate(ops)}
    if all(position[before] < position[op.name] for op in ops for before in predecessors[op.name]):
        return [op.name for op in ops]
    ready = [position[op.name] for op in ops if waiting[op.name] == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = ops[heapq.heappop(ready)].name
        order.append(name)
        for after in successors[name]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, position[after])
    return order


def find_cycle(order: Sequence[str], predecessors: Mapping[str, Sequence[str]]) -> list[str]:
    """A cycle, where `order` lacks ops.

    Every op outside the order has a predecessor outside the order, so walking backwards comes to one again.
    """
    placed = set(order)
    name = next(name for name in predecessors if name not in placed)
    path: list[str] = []
    seen: dict[str, int] = {}
    while name not in seen:
        seen[name] = len(path)
        path.append(name)
        name = next(before for before in predecessors[name] if before not in placed)
    return path[seen[name] :][::-1]
