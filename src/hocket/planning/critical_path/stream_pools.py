"""The memory of a plan on streams, each of which has a pool of its own.

A caching allocator gives a freed block to the stream that it was allocated on, and to no other (PyTorch's, see "Memory
management" in its notes on CUDA semantics; graphs keep to it, too). So what one stream has freed does not help another
one, and the step needs the sum of what each stream holds at most, whenever that is::

    one stream    |a a a|b b b|            b takes the block of a: 1 block
    two streams   |a a a|                  b is allocated on another stream: 2 blocks, though both never live at once
                        |b b b|

A value is freed at the first op of its own stream that comes after all of its users, as the executor of streams drops
it. The host allocates and frees in the order of the launches, so the sum is exact, up to what ops need within.
"""

from __future__ import annotations

from hocket.ir import Graph, Plan, launch_order, synchronisation
from hocket.planning.critical_path.memory import lasting_bytes


def pool_bytes(graph: Graph, plan: Plan) -> float:
    """Return the bytes that all streams hold together, and what lasts from step to step.

    Raises:
        PlanError: the plan does not fit the graph, or its lanes wait for each other in a circle.

    Example:
        >>> from hocket.ir import Buffer, Edge, Lane, Op
        >>> ops = (Op("a", writes=("x",)), Op("b", reads=("x",)), Op("c", writes=("y",)))
        >>> graph = Graph(ops, (Edge("a", "b"), Edge("b", "c")), buffers=(Buffer("x", 8.0), Buffer("y", 8.0)))
        >>> pool_bytes(graph, Plan((Lane("s", ("a", "b", "c")),)))
        8.0
        >>> pool_bytes(graph, Plan((Lane("s", ("a", "b")), Lane("t", ("c",)))))
        16.0
    """
    sync, order = synchronisation(graph, plan), launch_order(graph, plan)
    makers: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for name in order:
        for buffer in graph[name].writes:
            makers.setdefault(buffer, name)
        for buffer in dict.fromkeys((*graph[name].writes, *graph[name].reads)):
            users.setdefault(buffer, []).append(name)
    made: dict[str, list[tuple[str, float]]] = {}
    freed: dict[str, float] = {}  # by op, all of them on the op's own stream
    for buffer, size_bytes, life in graph.buffers:
        if life not in ("step", "kept") or buffer not in makers:
            continue
        maker = makers[buffer]
        made.setdefault(maker, []).append((buffer, size_bytes))
        last = _first_after(users[buffer], maker, plan, sync.clocks, sync.place) if life == "step" else None
        if last is not None:
            freed[last] = freed.get(last, 0.0) + size_bytes
    held = [0.0] * len(plan.lanes)
    peaks = [0.0] * len(plan.lanes)
    for name in order:
        lane = sync.place[name][0]
        held[lane] += sum(size_bytes for _, size_bytes in made.get(name, ()))
        peaks[lane] = max(peaks[lane], held[lane])
        held[lane] -= freed.get(name, 0.0)
    return lasting_bytes(graph) + sum(peaks)


def _first_after(
    users: list[str], maker: str, plan: Plan, clocks: dict[str, tuple[int, ...]], place: dict[str, tuple[int, int]]
) -> str | None:
    """The first op of the maker's stream that has ended after all users have, or None without one."""
    lane, position = place[maker]
    ops = plan.lanes[lane].ops
    for user in users:
        of_user, at = place[user]
        while clocks[ops[position]][of_user] <= at:
            position += 1
            if position == len(ops):
                return None
    return ops[position]
