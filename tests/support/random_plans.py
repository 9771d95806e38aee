"""Plans drawn at random among all that keep the order of a graph.

Nothing here needs an executor, so that `tests/gpu` can be collected without the C++ core.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from hocket.ir import Graph, Lane, Plan


def random_order(graph: Graph, chance: random.Random) -> list[str]:
    """Any order that respects the graph's edges."""
    left = {op.name: len(graph.predecessors[op.name]) for op in graph.ops}
    ready = [name for name, count in left.items() if not count]
    order = []
    while ready:
        name = ready.pop(chance.randrange(len(ready)))
        order.append(name)
        for after in graph.successors[name]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    return order


def on_lanes(order: Iterable[str], lanes: int, chance: random.Random) -> Plan:
    """Ops in this order, each on some lane. Lanes now and then keep what comes next, as real plans do."""
    ops: list[list[str]] = [[] for _ in range(lanes)]
    lane = 0
    for name in order:
        if chance.random() < 0.5:
            lane = chance.randrange(lanes)
        ops[lane].append(name)
    return Plan(tuple(Lane(f"lane{number}", tuple(mine)) for number, mine in enumerate(ops)))


def on_streams(plan: Plan) -> Plan:
    """The same lanes as streams of one GPU."""
    return replace(
        plan, lanes=tuple(replace(lane, kind="stream", device="gpu0", width=1, cores=()) for lane in plan.lanes)
    )
