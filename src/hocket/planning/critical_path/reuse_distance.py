r"""Dependency distance: the distance from an op to the first use of its output.

TurboDL's measure of how long an op may be postponed (section 2.4 and Algorithm 1): "the distance from a certain node to
its first reused node across iterations". A use is an op of the backbone (`hocket.planning.critical_path.backbone`). An
update is no use, but the forward of the next step that reads the parameter is. Distance is counted in levels: an op's
level is the length of the longest path to it from the step's start, and the next step begins after the last level::

    level   0        1        2        3        4        5        6    | 7 (the next step's 0)
            conv1 -> conv2 -> conv3 -> dA3 ---> dA2 ---> dW1 ---> u1 --|-> conv1'
                                  |       `---> dW2 ---> u2 -----------|----------> conv2'
                                  `--> dW3 ---> u3 --------------------|-------------------> conv3'

    dA3 is used by dA2: 1      dW1 by conv1': 7 - 5 = 2      dW2 by conv2': 8 - 4 = 4      dW3: 9 - 3 = 6

So an op of distance 1 is needed at once: it is critical. The weight gradient of a layer near the input, which the next
forward needs first and the backward computes last, is nearer to its use than one near the loss. Gradients should be
sent to other machines in this order, too.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from hocket.ir import Graph
from hocket.planning.critical_path.backbone import backbone_of


def levels(graph: Graph) -> dict[str, int]:
    """For each op the number of ops on the longest path to it from the step's start."""
    found: dict[str, int] = {}
    for name in graph.order:
        found[name] = 1 + max([found[before] for before in graph.predecessors[name]], default=-1)
    return found


def dependency_distance(graph: Graph, critical: set[str] | None = None) -> dict[str, float]:
    """For each op the distance to the first use of its output, in levels, infinite if there is none.

    Args:
        graph: one step, with its carried edges.
        critical: the ops that count as uses, by default those of the backbone.

    Example:
        >>> from hocket.ir import Carried, Edge, Op
        >>> ops = (Op("f", role="forward"), Op("dA", role="activation_grad"), Op("dW", role="weight_grad"))
        >>> edges = (Edge("f", "dA"), Edge("dA", "dW"), Edge("dW", "u"))
        >>> graph = Graph((*ops, Op("u", role="update")), edges, (Carried("u", "f"),))
        >>> dependency_distance(graph)
        {'f': 1.0, 'dA': 3.0, 'dW': 2.0, 'u': 1.0}
    """
    level = levels(graph)
    length = max(level.values(), default=-1) + 1
    uses = set(backbone_of(graph).ops) if critical is None else critical
    before: dict[str, list[tuple[str, int]]] = {op.name: [] for op in graph.ops}
    for edge in graph.edges:
        before[edge.dst].append((edge.src, level[edge.dst] - level[edge.src]))
    for src, dst in graph.carried:
        before[dst].append((src, length + level[dst] - level[src]))
    found = {op.name: math.inf for op in graph.ops}
    waiting = [(float(way), src) for use in uses for src, way in before[use]]
    heapify(waiting)
    while waiting:
        way, name = heappop(waiting)
        if way >= found[name]:
            continue
        found[name] = way
        if name not in uses:  # beyond a use it is another op's output
            for src, more in before[name]:
                heappush(waiting, (way + more, src))
    return found
