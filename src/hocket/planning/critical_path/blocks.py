r"""Blocks: the parts of a network with several parallel paths, each from a fork to the merge that closes it.

TurboDL (section 2.4, "Path analysis of the entire network") views a network as a sequence of blocks, each from a fork
layer to a merge layer, and compares paths only inside a block, since blocks run one after the other::

                 ,-- b --- c --.            ,-- f --.
        a ------<               >-- d -- e-<         >-- h         blocks: {b, c, x} of fork a and merge d,
                 `----- x -----'            `-- g --'                       {f, g} of fork e and merge h

Dominators give forks and merges: `a` dominates `c` if every path from the start to `c` leads through `a`, and `d`
post-dominates `c` if every path from `c` to the end leads through `d`. Ops that dominate the end are on every path.
They form the chain, and two neighbours of it have either no ops or one block between them. (Cooper, Harvey, Kennedy: "A
Simple, Fast Dominance Algorithm", 2001. On an acyclic graph one pass is enough.)
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from hocket.planning.critical_path.backbone import Backbone

START = -1


@dataclass(frozen=True)
class Block:
    """Ops of the backbone between a fork and its merge, by position in the backbone.

    Attributes:
        fork: the op before the block on every path, None for the step's start.
        merge: the op after it on every path, None for the step's end.
        ops: the ops between, in topological order.
    """

    fork: int | None
    merge: int | None
    ops: tuple[int, ...]


def dominators(above: Sequence[Sequence[int]]) -> list[int]:
    """For each op of a topological order its immediate dominator, or `START` if it has none.

    Args:
        above: for each of n ops its direct predecessors, all at smaller positions.

    Example:
        >>> dominators([[], [0], [0], [1, 2]])
        [-1, 0, 0, 0]
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
