r"""The backbone of a step: the ops that other ops of the same step wait for.

A layer's backward has three tasks (TurboDL, section 2.2): the activation gradient, which the layer below waits for, and
the weight and bias gradients, which only the update waits for. The update is needed only by the next step. So a step is
a backbone of forwards and activation gradients, and the other ops hang off it::

    backbone   conv1 - relu1 - conv2 - loss - dA2 - dRelu1      (conv1 reads the batch, so it has no dA)
                                               |       |
    others                                    dW2     dW1  - update1        (and dB1, dB2, update2)

Roles tell these apart, but edges take precedence: an update that a later forward of the *same* step reads (a GAN's
discriminator) is backbone, and a forward that leads to no gradient (a counter of batches) is not.

Edges of the backbone that a longer path implies are left out: a saved activation has an edge from its forward straight
to its backward, past the whole network, which would hide every op that all paths lead through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.ir import Graph

_TASKS = ("forward", "activation_grad")
_GRADIENTS = ("weight_grad", "bias_grad", "update")


@dataclass(frozen=True)
class Backbone:
    """The backbone's n ops in a topological order, with their direct predecessors and successors.

    Attributes:
        ops: names.
        above: for each op its direct predecessors, by position in `ops`.
        below: for each op its direct successors.
    """

    ops: tuple[str, ...]
    above: tuple[tuple[int, ...], ...]
    below: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.ops)


def backbone_of(graph: Graph) -> Backbone:
    """The backbone of a step.

    Example:
        >>> from hocket.ir import Edge, Op
        >>> ops = (Op("f", role="forward"), Op("dA", role="activation_grad"), Op("dW", role="weight_grad"))
        >>> graph = Graph((*ops, Op("u", role="update")), (Edge("f", "dA"), Edge("dA", "dW"), Edge("dW", "u")))
        >>> backbone_of(graph).ops
        ('f', 'dA')
    """
    members = _members(graph)
    ops = tuple(name for name in graph.order if name in members)
    place = {name: at for at, name in enumerate(ops)}
    edges = [[place[before] for before in graph.predecessors[name] if before in place] for name in ops]
    above = reduced(edges)
    below: list[list[int]] = [[] for _ in ops]
    for op, before in enumerate(above):
        for other in before:
            below[other].append(op)
    return Backbone(ops, tuple(map(tuple, above)), tuple(map(tuple, below)))


def _members(graph: Graph) -> set[str]:
    """Forwards and activation gradients that lead to some gradient, and all ops that they wait for."""
    useful: set[str] = set()
    if any(op.role in _GRADIENTS for op in graph.ops):
        for name in reversed(graph.order):
            if graph[name].role in _GRADIENTS or any(after in useful for after in graph.successors[name]):
                useful.add(name)
    else:
        useful = set(graph.by_name)
    found = {op.name for op in graph.ops if op.role in _TASKS and op.name in useful}
    if not found:  # a graph without roles: no op can be postponed
        return {op.name for op in graph.ops if op.role not in ("send", "recv")}
    for name in reversed(graph.order):
        if graph[name].role not in ("send", "recv") and any(after in found for after in graph.successors[name]):
            found.add(name)
    return found


def reduced(above: Sequence[Sequence[int]]) -> list[list[int]]:
    """The transitive reduction: the order without edges that others imply (Aho, Garey, Ullman 1972)."""
    masks: list[int] = []
    result = []
    for before in above:
        mine = 0
        kept = []
        for other in sorted(set(before), reverse=True):
            if not mine >> other & 1:
                kept.append(other)
                mine |= masks[other] | 1 << other
        masks.append(mine)
        result.append(kept[::-1])
    return result
