"""Dependencies between ops: data, memory that is written, and random numbers.

`make_fx` keeps in-place ops (batch-norm statistics, the optimizer), so data edges alone do not order a step. Every
tensor has a *root*, the storage it views. For each root, in program order::

    write ---> read, read ---> write        a read waits for the write before it,
                                            a write waits for the write and for all reads before it,

and ops that draw from the default random generator keep program order among themselves. So do those that may raise,
with what is written beyond the step (`around_raises`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """Effects of one op: the roots that it reads, those that it writes (new results included), and random draws."""

    reads: frozenset[int]
    writes: frozenset[int]
    random: bool = False


def orders(accesses: Sequence[Access]) -> dict[tuple[int, int], set[int]]:
    """Return pairs ``(before, after)`` of positions that must keep their order. Implied pairs may be missing.

    Each pair has the roots that flow along it: those that `before` wrote last and `after` reads.
    """
    pairs: dict[tuple[int, int], set[int]] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_random: int | None = None
    for position, access in enumerate(accesses):
        for root in access.reads | access.writes:
            if root in writer:
                flowing = pairs.setdefault((writer[root], position), set())
                if root in access.reads:
                    flowing.add(root)
        for root in access.writes:
            for reader in readers.pop(root, ()):
                pairs.setdefault((reader, position), set())
            writer[root] = position
        for root in access.reads - access.writes:
            readers.setdefault(root, []).append(position)
        if access.random:
            if last_random is not None:
                pairs.setdefault((last_random, position), set())
            last_random = position
    return pairs


def around_raises(
    accesses: Sequence[Access], raising: Collection[int], lasting: Collection[int]
) -> list[tuple[int, int]]:
    """Pairs ``(before, after)`` such that an op that raises leaves what it would leave in program order.

    Writes of the roots `lasting`, which outlive the step, and draws of random numbers stay on their side of each op
    that may raise, and these ops keep their order: the error is the one that program order meets first.
    """
    pairs: list[tuple[int, int]] = []
    last: int | None = None
    since: list[int] = []
    for position, access in enumerate(accesses):
        if position in raising:
            pairs += [(before, position) for before in since]
            pairs += [] if last is None else [(last, position)]
            last, since = position, []
        elif access.random or not access.writes.isdisjoint(lasting):
            since.append(position)
            pairs += [] if last is None else [(last, position)]
    return pairs


def carried(accesses: Sequence[Access], lasting: Iterable[int]) -> list[tuple[int, int]]:
    """Return pairs ``(before, after)`` across the end of the step, for roots that outlive it.

    The last write of this step comes before every read of the next one up to its first write, and before that write.
    Reads after the last write come before the next step's first write.
    """
    pairs: dict[tuple[int, int], None] = {}
    touching: dict[int, list[int]] = {root: [] for root in lasting}
    for position, access in enumerate(accesses):
        for root in access.reads | access.writes:
            if root in touching:
                touching[root].append(position)
    for root, positions in touching.items():
        writes = [position for position in positions if root in accesses[position].writes]
        if not writes:
            continue
        first, last = writes[0], writes[-1]
        for position in positions:
            if position <= first:
                pairs[last, position] = None
            if position > last:
                pairs[position, first] = None
    return list(pairs)
