"""From a traced step to a `Graph` and a `Program`: passes over a list of calls, each a plain function.

nodes --annotated_call--> calls --drop_dead, share_views, fuse_norms, tile_convolutions, chain_updates, split_updates,
split_conv_backward, fold_views--> actions
actions --roles, graph_of--> Graph
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from hocket.ir import Graph
from hocket.tracing.lowering import passes, roles
from hocket.tracing.lowering.calls import AnnotatedCall, SlotTable, StepCalls, annotated_call
from hocket.tracing.lowering.chains import chain_updates
from hocket.tracing.lowering.graph import graph_of
from hocket.tracing.lowering.norms import fuse_norms
from hocket.tracing.lowering.winograd import tile_convolutions
from hocket.tracing.program import Action, Program, Slot
from hocket.tracing.recording.op_arguments import Note
from hocket.tracing.recording.trace import Trace

# Native ops that a step may be lowered with in place of torch's, by the names that forms have for them. They round
# otherwise than torch's, so only forms that need not be bitwise have them.
NATIVE_OPS = FUSED_NORM, WINOGRAD = "fused-norm", "winograd"
# One with torch's bits, which any form may have.
UPDATE_CHAINS = "update-chains"


@dataclass(frozen=True)
class Lowered:
    """The graph, the program, the slots of everything the step leaves behind, and which native ops it may have."""

    graph: Graph
    program: Program
    slot_of: dict[fx.Node, int]
    native_ops: frozenset[str] = frozenset()


def lower(
    trace: Trace,
    *,
    split_backward: bool = True,
    pays: Callable[[str, str], bool] | None = None,
    native_ops: Collection[str] = (),
) -> Lowered:
    """Make the graph and the program of a trace, with those `native_ops` that replace torch's where possible.

    With `split_backward` the backward of every convolution is split, but for parts that, by name of the joint op and
    part, do not pay.
    """
    slots = SlotTable()
    inputs: dict[int, Any] = {}
    pieces: list[AnnotatedCall] = []
    for node in trace.graph.nodes:
        if node in trace.sources:
            slots.of[node] = slots.new(node.meta.get("val"), trace.roots[node])
            inputs[slots.of[node]] = trace.sources[node]
        elif node.op == "call_function" and node in trace.notes:
            pieces.append(annotated_call(node, trace.notes[node], slots))
    kept = frozenset(slots.of[node] for node in trace.left_behind)
    pieces = passes.share_views(passes.drop_dead(passes.drop_random_states(pieces), kept), kept)
    values = {slot: node.meta.get("val") for node, slot in slots.of.items()} if native_ops else {}
    if FUSED_NORM in native_ops:
        pieces = fuse_norms(StepCalls(pieces, values, slots.root, kept))
    if WINOGRAD in native_ops:
        pieces = tile_convolutions(StepCalls(pieces, values, slots.root, kept))
    if UPDATE_CHAINS in native_ops:
        pieces = chain_updates(StepCalls(pieces, values, slots.root, kept), inputs)
    pieces = passes.split_updates(pieces, slots.size_bytes, slots.root)
    gradients = {slots.of[node]: g for g, node in trace.gradients.items() if node is not None}
    if split_backward:
        names = roles.describe(pieces, slots.root, inputs, gradients).names
        pieces = passes.split_conv_backward(pieces, names, pays)
    pieces, prologue = passes.fold_views(pieces, set(inputs))
    described = roles.describe(pieces, slots.root, inputs, gradients)
    layers = {entry.name: entry.layer for entry in trace.places.parameters}
    actions = tuple(
        Action(
            name,
            (piece.call, *piece.views),
            layers.get(owner, piece.note.layer),
            piece.note.grad_mode,
            effects_before=_effects_before(piece.note, slots, kept),
            is_undone=piece.note.is_undone,
        )
        for name, owner, piece in zip(described.names, described.owners, pieces, strict=True)
    )
    program = Program(actions, Action("prologue", tuple(prologue)), len(slots.root), inputs, kept)
    return Lowered(graph_of(pieces, program, described.roles, slots, trace), program, slots.of, frozenset(native_ops))


def _effects_before(note: Note, slots: SlotTable, kept: Collection[int]) -> dict[Any, Any]:
    """Return the effects of a call's note with slots for gradients, of which those stay that the step leaves behind."""
    found = {
        place: Slot(slots.of[value]) if isinstance(value, fx.Node) else value
        for place, value in note.effects_before.items()
    }
    return {place: value for place, value in found.items() if not isinstance(value, Slot) or value.index in kept}
