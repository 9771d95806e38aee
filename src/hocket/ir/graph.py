"""`Graph`: the ops of one training step and the order that they must keep.

An edge ``(src, dst, size_bytes)`` says that `dst` may start when `src` has finished. It carries the bytes that flow
along it. An edge of 0 bytes is an order without data, as between a reader and the op that overwrites what it read. A
*carried* edge ``(src, dst)`` orders `src` of one step before `dst` of the next: an update feeds the next forward.

A graph may also list the memory that its ops touch: its *buffers*, and for each op those that it reads and writes. The
edges follow from that. Buffers serve to check the edges (`hocket.checking.hazards`) and to count bytes. Ops that must
run on one device for a reason that memory does not show (one depends on a number which another keeps) are *together*.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from hocket.errors import FormatError
from hocket.ir._fields import Reader, load_document, read_from, require_finite, save_document
from hocket.ir._topological import topological

FORMAT = "hocket-graph/1"

ROLES = ("forward", "activation_grad", "weight_grad", "bias_grad", "update", "recv", "send", "other")

BUFFER_LIVES = ("step", "kept", "lasting", "input")


class Edge(NamedTuple):
    """`dst` waits for `src` and receives `size_bytes` from it (0: an order without data)."""

    src: str
    dst: str
    size_bytes: float = 0.0


class Carried(NamedTuple):
    """`dst` of the next step waits for `src` of this one."""

    src: str
    dst: str


class Buffer(NamedTuple):
    """A piece of memory that ops read and write, views of it included.

    Attributes:
        name: unique in its graph.
        size_bytes: how large it is.
        life: ``step`` if it is allocated in the step and freed after its last reader, ``kept`` if it is allocated in
            the step and outlives it (a gradient, a result), ``lasting`` if it is the same memory in every step (a
            parameter, a running statistic), ``input`` if each step is given another one (the batch).
    """

    name: str
    size_bytes: float = 0.0
    life: str = "step"


@dataclass(frozen=True)
class Op:
    """One op of a step.

    Attributes:
        name: unique in its graph, without white space, so that a plan can name it in a line of text.
        target: the kernel, such as ``aten.convolution``.
        role: one of `ROLES`.
        layer: path of the module it belongs to, such as ``features.0``, or empty.
        flops: floating-point operations.
        size_bytes: bytes read and written (the field ``bytes`` of the file).
        stateless: neither mutates what outlives it nor draws random numbers, so it may run twice.
        reads: names of the buffers it reads, where the graph knows its buffers.
        writes: names of the buffers it writes or allocates. A buffer that it changes is in `reads` too.
    """

    name: str
    target: str = ""
    role: str = "other"
    layer: str = ""
    flops: float = 0.0
    size_bytes: float = 0.0
    stateless: bool = True
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "writes", tuple(self.writes))


@dataclass(frozen=True)
class Graph:
    """Ops in program order, the edges between them, the edges carried to the next step, and the buffers, if known.

    Each entry of `together` names ops that have to run on one device, for a reason that edges and buffers do not show.

    Raises `FormatError` at construction for a duplicate or unprintable op name, an unknown role, a negative or NaN
    size, an edge to a missing op, one that is together with others, a cycle (named op by op), and, in a graph that
    lists buffers, an op that touches another one.

    Example:
        >>> graph = Graph((Op("a"), Op("b")), (Edge("a", "b", 4.0),))
        >>> graph.predecessors["b"]
        ('a',)
    """

    ops: tuple[Op, ...]
    edges: tuple[Edge, ...] = ()
    carried: tuple[Carried, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "edges", tuple(Edge(*edge) for edge in self.edges))
        object.__setattr__(self, "carried", tuple(Carried(*edge) for edge in self.carried))
        object.__setattr__(self, "buffers", tuple(Buffer(*buffer) for buffer in self.buffers))
        object.__setattr__(self, "together", tuple(tuple(names) for names in self.together))
        _check(self, "graph")

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, name: str) -> Op:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each op in `ops`."""
        return {op.name: position for position, op in enumerate(self.ops)}

    @cached_property
    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """For each op the ops it waits for, each once."""
        return _neighbours(self.ops, ((edge.dst, edge.src) for edge in self.edges))

    @cached_property
    def successors(self) -> dict[str, tuple[str, ...]]:
        """For each op the ops that wait for it, each once."""
        return _neighbours(self.ops, ((edge.src, edge.dst) for edge in self.edges))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The ops in a topological order that departs from program order only where an edge demands it."""
        return tuple(topological(self.ops, self.predecessors, self.successors))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Graph:
        """Read a ``hocket-graph/1`` file."""
        reader = load_document(path, FORMAT)
        reader.only("format", "ops", "edges", "carried", "buffers", "together")
        ops = tuple(_read_op(element) for element in reader["ops"].elements())
        edges = tuple(_read_edge(element) for element in reader.get("edges", []).elements())
        carried = tuple(
            Carried(*(end.text() for end in element.elements(2))) for element in reader.get("carried", []).elements()
        )
        buffers = tuple(_read_buffer(element) for element in reader.get("buffers", []).elements())
        together = tuple(
            tuple(name.text() for name in element.elements()) for element in reader.get("together", []).elements()
        )
        with read_from(reader.source):
            return Graph(ops, edges, carried, buffers, together)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-graph/1`` file that reads back to an equal graph."""
        save_document(path, self.document())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the document: equal in every process for equal graphs."""
        return hashlib.sha256(json.dumps(self.document()).encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """The content of a ``hocket-graph/1`` file of this graph."""
        ops = [
            {
                "name": op.name,
                "target": op.target,
                "role": op.role,
                "layer": op.layer,
                "flops": op.flops,
                "bytes": op.size_bytes,
                "stateless": op.stateless,
                **{field: list(found) for field, found in (("reads", op.reads), ("writes", op.writes)) if found},
            }
            for op in self.ops
        ]
        document: dict[str, Any] = {
            "format": FORMAT,
            "ops": ops,
            "edges": [list(edge) for edge in self.edges],
            "carried": [list(edge) for edge in self.carried],
        }
        if self.buffers:
            document["buffers"] = [{"name": b.name, "bytes": b.size_bytes, "life": b.life} for b in self.buffers]
        if self.together:
            document["together"] = [list(names) for names in self.together]
        return document


def _read_op(reader: Reader) -> Op:
    reader.only("name", "target", "role", "layer", "flops", "bytes", "stateless", "reads", "writes")
    return Op(
        name=reader["name"].text(),
        target=reader.get("target", "").text(),
        role=reader.get("role", "other").text(),
        layer=reader.get("layer", "").text(),
        flops=reader.get("flops", 0.0).number(),
        size_bytes=reader.get("bytes", 0.0).number(),
        stateless=reader.get("stateless", True).boolean(),
        reads=tuple(element.text() for element in reader.get("reads", []).elements()),
        writes=tuple(element.text() for element in reader.get("writes", []).elements()),
    )


def _read_buffer(reader: Reader) -> Buffer:
    reader.only("name", "bytes", "life")
    return Buffer(reader["name"].text(), reader.get("bytes", 0.0).number(), reader.get("life", "step").text())


def _read_edge(reader: Reader) -> Edge:
    elements = reader.elements()
    if len(elements) not in (2, 3):
        raise reader.fail(f"expected [src, dst, bytes], got {len(elements)} elements")
    size_bytes = elements[2].number() if len(elements) == 3 else 0.0
    return Edge(elements[0].text(), elements[1].text(), size_bytes)


def _check(graph: Graph, source: str) -> None:
    names: set[str] = set()
    for position, op in enumerate(graph.ops):
        where = f"ops[{position}]"
        if not op.name or any(character.isspace() for character in op.name):
            raise FormatError(source, f"{where}.name", f"expected a name without white space, got {op.name!r}")
        if op.name in names:
            raise FormatError(source, f"{where}.name", f"duplicate op name {op.name!r}")
        names.add(op.name)
        if op.role not in ROLES:
            raise FormatError(
                source, f"{where}.role", f"op {op.name!r}: unknown role {op.role!r}; one of {', '.join(ROLES)}"
            )
        for field, value in (("flops", op.flops), ("bytes", op.size_bytes)):
            require_finite(value, source, f"{where}.{field}", f"op {op.name!r}: ")
    for kind, pairs in (("edges", graph.edges), ("carried", graph.carried)):
        for position, pair in enumerate(pairs):
            for end in pair[:2]:
                if end not in names:
                    raise FormatError(
                        source, f"{kind}[{position}]", f"{pair[0]!r} -> {pair[1]!r} names a missing op {end!r}"
                    )
    for position, edge in enumerate(graph.edges):
        require_finite(edge.size_bytes, source, f"edges[{position}]", f"{edge.src!r} -> {edge.dst!r}: bytes: ")
    for position, together in enumerate(graph.together):
        for name in together:
            if name not in names:
                raise FormatError(source, f"together[{position}]", f"names a missing op {name!r}")
    _check_buffers(graph, source)
    if len(graph.order) < len(graph.ops):
        try:
            TopologicalSorter(graph.predecessors).prepare()
        except CycleError as error:
            raise FormatError(source, "edges", f"cycle: {' -> '.join(error.args[1])}") from None


def _check_buffers(graph: Graph, source: str) -> None:
    known: set[str] = set()
    for position, buffer in enumerate(graph.buffers):
        where = f"buffers[{position}]"
        if not buffer.name or buffer.name in known:
            raise FormatError(source, f"{where}.name", f"expected a name of its own, got {buffer.name!r}")
        known.add(buffer.name)
        require_finite(buffer.size_bytes, source, f"{where}.bytes", f"buffer {buffer.name!r}: ")
        if buffer.life not in BUFFER_LIVES:
            raise FormatError(
                source,
                f"{where}.life",
                f"buffer {buffer.name!r}: expected one of {', '.join(BUFFER_LIVES)}, got {buffer.life!r}",
            )
    if not known:  # a graph made from another one, such as a coarser one, need not list buffers
        return
    for position, op in enumerate(graph.ops):
        for field, names in (("reads", op.reads), ("writes", op.writes)):
            for name in names:
                if name not in known:
                    raise FormatError(
                        source, f"ops[{position}].{field}", f"op {op.name!r} {field} a missing buffer {name!r}"
                    )


def _neighbours(ops: Iterable[Op], pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {op.name: {} for op in ops}
    for at, other in pairs:
        found[at][other] = None
    return {name: tuple(others) for name, others in found.items()}
