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

Blocks: the parts of a network with several parallel paths, each from a fork to the merge that closes it.

TurboDL (section 2.4, "Path analysis of the entire network") views a network as a sequence of blocks, each from a fork
layer to a merge layer, and compares paths only inside a block, since blocks run one after the other::

                 ,-- b --- c --.            ,-- f --.
        a ------<               >-- d -- e-<         >-- h         blocks: {b, c, x} of fork a and merge d,
                 `----- x -----'            `-- g --'                       {f, g} of fork e and merge h

Dominators give forks and merges: `a` dominates `c` if every path from the start to `c` leads through `a`, and `d`
post-dominates `c` if every path from `c` to the end leads through `d`. Ops that dominate the end are on every path.
They form the chain, and two neighbours of it have either no ops or one block between them. (Cooper, Harvey, Kennedy: "A
Simple, Fast Dominance Algorithm", 2001. On an acyclic graph one pass is enough.)

Layer paths: the paths through a block, the longest one first.

TurboDL ranks the paths from a block's fork to its merge by the sum of their activation gradients' times. The longest is
the block's critical path (Algorithm 1)::

            ,-- 5 --- 4 --.           1st: 9, 2nd: 7, 3rd: 6. An op on several paths belongs to the longest of them
    fork --<-- 3 -- 4 --- >-- merge
            `---- 6 ------'

Taken literally, that is a sorted list of all paths. But a block in which every op precedes every later one has
exponentially many paths, so `ranked_paths` finds the same result without a list. The longest path through an op
consists of the longest path to it, the op, and the longest path from it, and both follow from the neighbours (dynamic
programming). In the sorted list, the first path that contains an op is the longest one through it. So the next layer
path is the longest path through any op that has none yet, without the ops that have one::

    longest path through each op:    5: 9    4: 9    3: 7    4: 7    6: 6

Times are whole nanoseconds, so that sums are exact and equal paths are equal.

Dependency distance: the distance from an op to the first use of its output.

TurboDL's measure of how long an op may be postponed (section 2.4 and Algorithm 1): "the distance from a certain node to
its first reused node across iterations". A use is an op of the backbone. An update is no use, but the forward of the
next step that reads the parameter is. Distance is counted in levels: an op's level is the length of the longest path to
it from the step's start, and the next step begins after the last level::

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
from collections.abc import Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hocket.ir import Graph

_TASKS = ("forward", "activation_grad")
_GRADIENTS = ("weight_grad", "bias_grad", "update")


@dataclass(frozen=True)
class Backbone:
    """The backbone's n ops in a topological order, with their direct predecessors and successors."""

    ops: tuple[str, ...]  # names
    above: tuple[tuple[int, ...], ...]  # for each op its direct predecessors, by position in `ops`
    below: tuple[tuple[int, ...], ...]  # for each op its direct successors

    def __len__(self) -> int:
        return len(self.ops)


def backbone_of(graph: Graph) -> Backbone:
    """The backbone of a step."""
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


START = -1


@dataclass(frozen=True)
class Block:
    """Ops of the backbone between a fork and its merge, by position in the backbone."""

    fork: int | None  # the op before the block on every path, None for the step's start
    merge: int | None  # the op after it on every path, None for the step's end
    ops: tuple[int, ...]  # the ops between, in topological order


def dominators(above: Sequence[Sequence[int]]) -> list[int]:
    """For each op of a topological order its immediate dominator, or `START` if it has none.

    `above` has the direct predecessors of each op, all at smaller positions.
    """
    found: list[int] = []
    depth: list[int] = []
    for before in above:
        if before:
            common = before[0]
            for other in before[1:]:
                common = _common(common, other, found, depth)
        else:
            common = START
        found.append(common)
        depth.append(0 if common == START else depth[common] + 1)
    return found


def _common(one: int, other: int, immediate: Sequence[int], depth: Sequence[int]) -> int:
    while one != other:
        if one == START or other == START:
            return START
        if depth[one] >= depth[other]:
            one = immediate[one]
        else:
            other = immediate[other]
    return one


def blocks_of(backbone: Backbone) -> list[Block]:
    """The blocks of a backbone, in order. A chain has none."""
    count = len(backbone)
    if not count:
        return []
    last = count - 1
    # The end follows all ops without successors.
    forward = dominators([*backbone.above, [op for op in range(count) if not backbone.below[op]]])
    backward = dominators([[last - after for after in backbone.below[last - op]] for op in range(count)])
    chain: set[int] = set()
    at = forward[count]
    while at != START:
        chain.add(at)
        at = forward[at]
    mirrored = {last - op for op in chain}
    members: dict[tuple[int | None, int | None], list[int]] = {}
    for op in range(count):
        if op not in chain:
            fork, merge = _up(op, forward, chain), _up(last - op, backward, mirrored)
            members.setdefault((fork, None if merge is None else last - merge), []).append(op)
    return [Block(*ends, tuple(ops)) for ends, ops in sorted(members.items(), key=lambda item: item[1][0])]


def _up(op: int, immediate: Sequence[int], stops: Set[int]) -> int | None:
    """The nearest op of `stops` above `op`."""
    at = immediate[op]
    while at != START and at not in stops:
        at = immediate[at]
    return None if at == START else at


@dataclass(frozen=True)
class Path:
    """A path through a block: its length, and those of its ops that are on no longer path, in topological order."""

    length_ns: int
    ops: tuple[int, ...]


def in_ns(durations_us: Sequence[float]) -> list[int]:
    """Durations in whole nanoseconds."""
    return [round(us * 1000) for us in durations_us]


def ranked_paths(backbone: Backbone, block: Block, durations_ns: Sequence[int]) -> list[Path]:
    """The paths of a block, the most critical first, where each op is on one of them."""
    inside = set(block.ops)
    above = {op: [other for other in backbone.above[op] if other in inside] for op in block.ops}
    below = {op: [other for other in backbone.below[op] if other in inside] for op in block.ops}
    up, down = dict.fromkeys(block.ops, 0), dict.fromkeys(block.ops, 0)
    for op in block.ops:
        up[op] = max([up[other] + durations_ns[other] for other in above[op]], default=0)
    for op in reversed(block.ops):
        down[op] = max([down[other] + durations_ns[other] for other in below[op]], default=0)
    through = {op: up[op] + durations_ns[op] + down[op] for op in block.ops}
    left = dict.fromkeys(block.ops)
    paths = []
    for op in sorted(block.ops, key=lambda op: (-through[op], op)):
        if op not in left:
            continue
        way = [op]
        while above[way[-1]]:
            way.append(next(other for other in above[way[-1]] if up[other] + durations_ns[other] == up[way[-1]]))
        way.reverse()
        while below[way[-1]]:
            way.append(next(other for other in below[way[-1]] if down[other] + durations_ns[other] == down[way[-1]]))
        mine = tuple(other for other in way if other in left)
        for other in mine:
            del left[other]
        paths.append(Path(through[op], mine))
    return paths


def levels(graph: Graph) -> dict[str, int]:
    """For each op the number of ops on the longest path to it from the step's start."""
    found: dict[str, int] = {}
    for name in graph.order:
        found[name] = 1 + max([found[before] for before in graph.predecessors[name]], default=-1)
    return found


def dependency_distance(graph: Graph, critical: set[str] | None = None) -> dict[str, float]:
    """For each op the distance to the first use of its output, in levels, infinite if there is none.

    Carried edges count. The `critical` ops count as uses, by default those of the backbone.
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
