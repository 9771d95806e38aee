"""The `hocket.ir.Graph` of a lowered step: ops, edges with their bytes, edges into the next step, buffers."""

from __future__ import annotations

from typing import Any

from torch import fx

from hocket.ir import Buffer, Carried, Edge, Graph, Op
from hocket.tracing.lowering import dependencies
from hocket.tracing.lowering.calls import AnnotatedCall, SlotTable
from hocket.tracing.lowering.passes import unread
from hocket.tracing.program import Program
from hocket.tracing.recording.trace import Trace

# The default random generator: every op that draws from it reads and writes it.
_GENERATOR = Buffer("random generator", life="lasting")


def graph_of(pieces: list[AnnotatedCall], program: Program, found: list[str], slots: SlotTable, trace: Trace) -> Graph:
    """The graph of the actions of `program`, which were made of `pieces` and have the roles `found`."""
    buffers = _buffers(pieces, program, slots)
    ops = []
    for piece, action, role in zip(pieces, program.actions, found, strict=True):
        idle = unread(piece.call)
        used = [slot for slot in (*action.reads, *action.fills) if slot not in idle]
        touched = {slots.root[slot]: slots.size_bytes[slot] for slot in used}
        access = piece.access
        ops.append(
            Op(
                action.name,
                piece.target,
                role,
                action.layer,
                piece.flops,
                sum(touched.values()),
                not (piece.note.writes or access.random),
                *(_touched(roots, access.random, buffers) for roots in (access.reads, access.writes)),
            )
        )
    maker = {slot: position for position, action in enumerate(program.actions) for slot in action.fills}
    accesses = [piece.access for piece in pieces]
    pairs = dependencies.orders(accesses)
    raising = {position for position, piece in enumerate(pieces) if piece.may_raise}
    lasting = {root for slot in (*program.inputs, *program.effect_slots) if (root := slots.root[slot]) is not None}
    for pair in dependencies.around_raises(accesses, raising, lasting):
        pairs.setdefault(pair, set())
    for position, action in enumerate(program.actions):
        for slot in action.reads:
            if slot in maker:
                pairs.setdefault((maker[slot], position), set())
    edges = []
    for (before, after), flowing in sorted(pairs.items()):
        # Two views of one storage are one flow of bytes: the larger of them.
        flow: dict[int | None, float] = {}
        for slot in program.actions[after].reads:
            if slots.root[slot] in flowing:
                flow[slots.root[slot]] = max(flow.get(slots.root[slot], 0.0), slots.size_bytes[slot])
        edges.append(Edge(program.actions[before].name, program.actions[after].name, sum(flow.values())))
    random = (_GENERATOR,) if any(piece.access.random for piece in pieces) else ()
    carried = tuple(_carried(pieces, program, maker, slots, trace))
    return Graph(tuple(ops), tuple(edges), carried, (*buffers.values(), *random))


def _buffers(pieces: list[AnnotatedCall], program: Program, slots: SlotTable) -> dict[int, Buffer]:
    """A buffer for each root that an op touches: named after the place it comes from, or after the op that makes it."""
    touched = frozenset().union(*(piece.access.reads | piece.access.writes for piece in pieces))
    kept = {slots.root[slot] for slot in program.kept}
    found: dict[int, Buffer] = {}
    names: set[str] = set()
    for slot, source in program.inputs.items():
        root = slots.root[slot]
        if root in touched and root is not None and root not in found and source.name not in names:
            names.add(source.name)
            found[root] = Buffer(source.name, slots.size_bytes[slot], "input" if source.kind == "batch" else "lasting")
    for piece, action in zip(pieces, program.actions, strict=True):
        for position, slot in enumerate(action.fills):
            root = slots.root[slot]
            if root is not None and root not in found and root in piece.access.writes:
                life = "kept" if root in kept else "step"
                found[root] = Buffer(f"{action.name}:{position}", slots.size_bytes[slot], life)
    return found


def _touched(roots: frozenset[int], random: bool, buffers: dict[int, Buffer]) -> tuple[str, ...]:
    names = sorted(buffers[root].name for root in roots if root in buffers)
    return (*names, _GENERATOR.name) if random else tuple(names)


def _carried(
    pieces: list[AnnotatedCall], program: Program, maker: dict[int, int], slots: SlotTable, trace: Trace
) -> list[Carried]:
    lasting = {
        root
        for slot, source in program.inputs.items()
        if source.kind != "batch" and (root := slots.root[slot]) is not None
    }
    pairs = dependencies.carried([piece.access for piece in pieces], lasting)
    random = [position for position, piece in enumerate(pieces) if piece.access.random]
    if random:
        pairs.append((random[-1], random[0]))
    slot_of = {source: slot for slot, source in program.inputs.items()}
    readers: dict[int, list[int]] = {}
    for position, action in enumerate(program.actions):
        for slot in action.reads:
            readers.setdefault(slot, []).append(position)
    replaced: dict[Any, fx.Node | None] = {**trace.rebound, **trace.gradients}
    for source, node in replaced.items():
        # The next step finds the tensor of this step at that place.
        if node is not None and source in slot_of and slots.of[node] in maker:
            made = maker[slots.of[node]]
            pairs += [(made, reader) for reader in readers.get(slot_of[source], ())]
    name = [action.name for action in program.actions]
    return [Carried(name[before], name[after]) for before, after in dict.fromkeys(pairs)]
