r"""Blocks: the parts of a network in which several ways run side by side, from a fork to the merge that closes it.

TurboDL (section 2.4, "Path analysis of the entire network") takes a network for a sequence of blocks, each from a fork
layer to a merge layer, and compares ways only inside a block, since blocks run one after the other::

                 ,-- b --- c --.            ,-- f --.
        a ------<               >-- d -- e-<         >-- h         blocks: {b, c, x} of fork a and merge d,
                 `----- x -----'            `-- g --'                       {f, g} of fork e and merge h

A fork and the merge that closes it are told by dominators: `a` dominates `c` if every way from the start to `c` leads
through `a`; `d` post-dominates `c` if every way from `c` to the end leads through `d`. Ops that dominate the end lie on
every way: they are the chain, and between two neighbours of it there is nothing, or a block. (Cooper, Harvey, Kennedy:
"A Simple, Fast Dominance Algorithm", 2001; on a graph without cycles one pass is enough.)
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
        fork: the op before the block on every way; None: the step's start.
        merge: the op after it on every way; None: the step's end.
        ops: those between, in topological order.
    """

    fork: int | None
    merge: int | None
    ops: tuple[int, ...]


def dominators(above: Sequence[Sequence[int]]) -> list[int]:
    """For each op of a topological order its immediate dominator; `START` where only the start is.

    Args:
        above: for each of n ops the ops right before it, all at smaller positions.

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
    """The blocks of a backbone, in order; a chain has none."""
    count = len(backbone)
    if not count:
        return []
    last = count - 1
    # The end stands behind all ops that nothing follows.
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
