"""An order of small peak memory: the next op is always the ready one that leaves the fewest bytes allocated.

It serves limits below eager's peak, which only another order can keep. It is a heuristic, since the best order is
NP-hard to find (Sethi: "Complete register allocation problems", 1975), so a limit that it misses may still be possible.
Among equals the first in program order runs next.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from hocket.ir import Graph


def min_memory_order(graph: Graph) -> tuple[str, ...]:
    """All ops in a topological order of small peak.

    Example:
        >>> from hocket.ir import Buffer, Edge, Op
        >>> ops = (Op("a", writes=("x",)), Op("b", writes=("y",)), Op("use", reads=("x",)))
        >>> min_memory_order(Graph(ops, (Edge("a", "use"),), buffers=(Buffer("x", 8.0), Buffer("y", 8.0, "kept"))))
        ('a', 'use', 'b')
    """
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life in ("step", "kept")}
    kept = {buffer.name for buffer in graph.buffers if buffer.life == "kept"}
    users: dict[str, set[str]] = {}
    for op in graph.ops:
        for buffer in (*op.reads, *op.writes):
            users.setdefault(buffer, set()).add(op.name)
    made: set[str] = set()
    place = {name: at for at, name in enumerate(graph.order)}

    def leaves_behind(name: str) -> float:
        op = graph[name]
        found = sum(size[b] for b in set(op.writes) if b in size and b not in made)
        touched = {*op.reads, *op.writes}
        return found - sum(size[b] for b in touched if b in size and b not in kept and users[b] == {name})

    waiting = {name: len(before) for name, before in graph.predecessors.items()}
    ready = [(leaves_behind(name), place[name], name) for name, count in waiting.items() if not count]
    heapify(ready)
    order: dict[str, None] = {}
    while ready:
        behind, at, name = heappop(ready)
        if name in order:
            continue
        now = leaves_behind(name)
        if now != behind:  # another user of its buffers has run in the meantime
            heappush(ready, (now, at, name))
            continue
        order[name] = None
        made.update(graph[name].writes)
        for buffer in {*graph[name].reads, *graph[name].writes}:
            users[buffer].discard(name)
            if len(users[buffer]) == 1:  # the last user now frees it
                (other,) = users[buffer]
                if not waiting[other] and other not in order:
                    heappush(ready, (leaves_behind(other), place[other], other))
        for after in graph.successors[name]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (leaves_behind(after), place[after], after))
    return tuple(order)
