"""Ops of a step that share a device because of the memory that they touch: written memory has one home.

An op on another device reads a copy, made once a step. So it may not need a value between two writes, and for memory
that outlives the step it may not need a value that this step has written::

    lasting   read  read | write  read  write    all from the first write on
    a value                write  read  write | read  read    all up to the last write

Ops that draw random numbers all write the generator, so they are together as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.ir import Graph


def one_home(graph: Graph) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each buffer that is written, and the ops that share its home. Empty for a graph without buffers.

    Example:
        >>> from hocket.ir import Buffer, Op
        >>> draws = {"reads": ("generator",), "writes": ("generator",)}
        >>> ops = (Op("a", **draws), Op("b"), Op("c", **draws))
        >>> list(one_home(Graph(ops, buffers=(Buffer("generator", 0.0, "lasting"),))))
        [('generator', ('a', 'c'))]
    """
    touching: dict[str, dict[str, None]] = {}
    writing: dict[str, list[str]] = {}
    for op in graph.ops:
        for buffer in (*op.reads, *op.writes):
            touching.setdefault(buffer, {})[op.name] = None
        for buffer in op.writes:
            writing.setdefault(buffer, []).append(op.name)
    life = {buffer.name: buffer.life for buffer in graph.buffers}
    place = graph.index
    for buffer, writers in writing.items():
        if buffer not in life:
            continue
        first, last = place[writers[0]], place[writers[-1]]
        lasts = life[buffer] in ("lasting", "input")
        sharing = (op for op in touching[buffer] if (place[op] >= first if lasts else place[op] <= last))
        yield buffer, tuple(sharing)
