"""From a traced step to a `Graph` and a `Program`: passes over a list of calls, each a plain function.

nodes --calls_of--> calls --drop_dead--> --split--> --fold views--> actions --name, roles--> Graph + Program
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_iter

from hocket.ir import Buffer, Carried, Edge, Graph, Op
from hocket.tracing import effects, roles, split, unread
from hocket.tracing.flops import flops
from hocket.tracing.program import Action, Call, Program, Slot
from hocket.tracing.state import Gradient
from hocket.tracing.trace import Trace
from hocket.tracing.watch import Note

__all__ = ["AnnotatedCall", "Lowered", "lower"]


@dataclass(frozen=True)
class AnnotatedCall:
    """A call with what is known of it: the note of the watch, its size, the part of a split op."""

    call: Call
    note: Note
    flops: float
    part: str = ""
    views: tuple[Call, ...] = ()

    @property
    def access(self) -> effects.Access:
        """A fresh result is a root that the op writes: nobody can read it before."""
        fresh = frozenset(r for r in self.note.returns if r is not None) - self.note.reads
        return effects.Access(self.note.reads, self.note.writes | fresh, self.note.random)

    @property
    def target(self) -> str:
        return str(getattr(self.call.func, "_overloadpacket", self.call.func))

    @property
    def kernel(self) -> str:
        return self.target.rpartition(".")[2]


@dataclass
class _Slots:
    """Numbers for the values of a trace, with their size and root."""

    of: dict[fx.Node, int] = field(default_factory=dict)
    size_bytes: list[float] = field(default_factory=list)
    root: list[int | None] = field(default_factory=list)

    def new(self, value: Any, root: int | None) -> int:
        self.size_bytes.append(_size_bytes(value))
        self.root.append(root)
        return len(self.root) - 1


@dataclass(frozen=True)
class Lowered:
    """The graph, the program, and the slots of everything the step leaves behind."""

    graph: Graph
    program: Program
    slot_of: dict[fx.Node, int]


def lower(trace: Trace, *, split_backward: bool = True, pays: Callable[[str, str], bool] | None = None) -> Lowered:
    """Make the graph and the program of a trace.

    `split_backward` takes every convolution's backward apart; `pays(name of the joint op, part)` may then keep a part
    with the others.
    """
    slots = _Slots()
    inputs: dict[int, Any] = {}
    pieces: list[AnnotatedCall] = []
    sources = iter(trace.sources)
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            slots.of[node] = slots.new(node.meta.get("val"), trace.roots[node])
            inputs[slots.of[node]] = next(sources)
        elif node.op == "call_function" and node in trace.notes:
            pieces.append(_piece(node, trace.notes[node], slots))
    kept = frozenset(slots.of[node] for node in _left_behind(trace))
    pieces = _drop_dead(pieces, kept)
    gradients = {slots.of[node]: g for g, node in trace.gradients.items() if node is not None}
    if split_backward:
        names = roles.describe(pieces, slots.root, inputs, gradients).names
        pieces = _split(pieces, names, pays)
    pieces, prologue = _fold_views(pieces, set(inputs))
    described = roles.describe(pieces, slots.root, inputs, gradients)
    layers = {entry.name: entry.layer for entry in trace.places.parameters}
    actions = tuple(
        Action(name, (piece.call, *piece.views), layers.get(owner, piece.note.layer), piece.note.grad_mode)
        for name, owner, piece in zip(described.names, described.owners, pieces, strict=True)
    )
    program = Program(actions, Action("prologue", tuple(prologue)), len(slots.root), inputs, kept)
    return Lowered(_graph(pieces, program, described.roles, slots, trace), program, slots.of)


def _left_behind(trace: Trace) -> list[fx.Node]:
    nodes = [leaf for kind, leaf in trace.result.leaves if kind in ("item", "tensor")]
    return [*nodes, *(n for n in trace.gradients.values() if n is not None), *trace.rebound.values()]


def _piece(node: fx.Node, note: Note, slots: _Slots) -> AnnotatedCall:
    func: Any = node.target
    value = node.meta.get("val")
    args = _slotted(node.args, slots, note, (0,))
    kwargs = _slotted(node.kwargs, slots, note, (1,))
    kwargs.update({path[1]: r for path, r in note.scalars.items() if len(path) == 2 and path[0] == 1})
    shaped = unread.without_data(func, value)
    if shaped is not None:
        func, args, kwargs = shaped
        note = replace(note, reads=frozenset())
    outs: dict[int | None, int] = {}
    taken = [user for user in node.users if user.target is operator.getitem]
    for user in taken:
        position = int(user.args[1])  # type: ignore[arg-type]
        if position not in outs:
            root = note.returns[position] if position < len(note.returns) else None
            outs[position] = slots.new(user.meta.get("val"), root)
        slots.of[user] = outs[position]
    if isinstance(value, torch.Tensor):
        same = _same_value(func, node, slots)
        if same is None:
            outs[None] = slots.new(value, note.returns[0] if note.returns else None)
        slots.of[node] = outs.get(None, -1 if same is None else same)
    piece = AnnotatedCall(Call(func, args, kwargs, outs), note, flops(func, *_values(node), value))
    # `detach` and its like make no value of their own: whoever reads the result reads the argument.
    return piece


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _same_value(func: Any, node: fx.Node, slots: _Slots) -> int | None:
    """The slot whose tensor this op returns: one that writes returns what it wrote, a detach the tensor itself."""
    returns = func._schema.returns
    written = returns[0].alias_info if len(returns) == 1 else None
    if func in _ALIASES:
        same = node.args[0]
    elif written is not None and written.is_write:
        position, name = next(
            (position, argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.before_set == written.before_set
        )
        same = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    else:
        return None
    return slots.of[same] if isinstance(same, fx.Node) else None


def _values(node: fx.Node) -> tuple[Any, Any]:
    def value(argument: fx.Node) -> Any:
        return argument.meta.get("val")

    return fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)


def _slotted(value: Any, slots: _Slots, note: Note, path: tuple[Any, ...]) -> Any:
    if isinstance(value, fx.Node):
        return Slot(slots.of[value])
    if path in note.scalars:
        return note.scalars[path]
    if isinstance(value, (tuple, list)):
        return tuple(_slotted(element, slots, note, (*path, i)) for i, element in enumerate(value))
    if isinstance(value, dict):
        return {key: _slotted(element, slots, note, (*path, key)) for key, element in value.items()}
    return value


def _drop_dead(pieces: list[AnnotatedCall], kept: frozenset[int]) -> list[AnnotatedCall]:
    """Leave out what nobody reads, unless it writes what outlives it or draws random numbers."""
    needed = set(kept)
    alive: list[AnnotatedCall] = []
    for piece in reversed(pieces):
        call = piece.call
        if piece.note.writes or piece.note.random or needed.intersection(call.outs.values()):
            needed.update(call.reads)
            outs = {position: slot for position, slot in call.outs.items() if slot in needed}
            alive.append(replace(piece, call=replace(call, outs=outs)))
    return alive[::-1]


def _split(
    pieces: list[AnnotatedCall], names: list[str], pays: Callable[[str, str], bool] | None
) -> list[AnnotatedCall]:
    result: list[AnnotatedCall] = []
    for piece, name in zip(pieces, names, strict=True):
        if not split.is_joint(piece.call):
            result.append(piece)
            continue
        wanted = [p for p in piece.call.outs if p is not None and p < 2]
        worth = {part: pays is None or pays(name, part) for part in split.PARTS}
        for part, call in split.parts(piece.call, worth.__getitem__):
            returns = tuple(r if p in call.outs else None for p, r in enumerate(piece.note.returns))
            share = sum(p in call.outs for p in wanted) / max(1, len(wanted))
            size = piece.flops * share
            result.append(replace(piece, call=call, note=replace(piece.note, returns=returns), flops=size, part=part))
    return result


def _is_view(piece: AnnotatedCall) -> bool:
    """Whether the op only makes new tensors over memory of its one tensor argument, and computes nothing."""
    returns = [root for root in piece.note.returns if root is not None]
    return (
        bool(returns)
        and not piece.note.writes
        and not piece.note.random
        and piece.note.reads.issuperset(returns)
        and len(piece.call.reads) == 1
    )


def _reshaped(piece: AnnotatedCall) -> tuple[int, ...]:
    """The slot whose tensor gets another shape in place (``unsqueeze_``), if there is one."""
    tags = getattr(piece.call.func, "tags", ())
    return piece.call.reads[:1] if torch.Tag.inplace_view in tags else ()


def _fold_views(pieces: list[AnnotatedCall], inputs: set[int]) -> tuple[list[AnnotatedCall], list[Call]]:
    """Views go where their argument is made: into that op, or into the prologue for views of inputs."""
    maker: dict[int, int] = {}
    early = set(inputs)
    prologue: list[Call] = []
    result: list[AnnotatedCall] = []
    for piece in pieces:
        slots = piece.call.outs.values()
        if _is_view(piece):
            (argument,) = piece.call.reads
            if argument in early:
                prologue.append(piece.call)
                early.update(slots)
                continue
            at = maker[argument]
            result[at] = replace(result[at], views=(*result[at].views, piece.call))
        else:
            at = len(result)
            result.append(piece)
            for changed in _reshaped(piece):
                # Views that are taken from now on see the new shape, so they come after this op.
                maker[changed] = at
                early.discard(changed)
        maker.update(dict.fromkeys(slots, at))
    return result, prologue


# The default random generator: every op that draws from it reads and writes it.
_GENERATOR = Buffer("random generator", life="lasting")


def _graph(pieces: list[AnnotatedCall], program: Program, found: list[str], slots: _Slots, trace: Trace) -> Graph:
    buffers = _buffers(pieces, program, slots)
    ops = []
    for piece, action, role in zip(pieces, program.actions, found, strict=True):
        idle = split.unread(piece.call)
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
    pairs = effects.orders([piece.access for piece in pieces])
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


def _buffers(pieces: list[AnnotatedCall], program: Program, slots: _Slots) -> dict[int, Buffer]:
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
    pieces: list[AnnotatedCall], program: Program, maker: dict[int, int], slots: _Slots, trace: Trace
) -> list[Carried]:
    lasting = {
        root
        for slot, source in program.inputs.items()
        if source.kind != "batch" and (root := slots.root[slot]) is not None
    }
    pairs = effects.carried([piece.access for piece in pieces], lasting)
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
        # What was made in this step is what the next one finds at that place.
        if node is not None and source in slot_of and slots.of[node] in maker:
            made = maker[slots.of[node]]
            pairs += [(made, reader) for reader in readers.get(slot_of[source], ())]
    name = [action.name for action in program.actions]
    return [Carried(name[before], name[after]) for before, after in dict.fromkeys(pairs)]


def _size_bytes(value: Any) -> float:
    return float(sum(math.prod(v.shape) * v.element_size() for v in tree_iter(value) if isinstance(v, torch.Tensor)))


def gradients_of(trace: Trace, slot_of: dict[fx.Node, int]) -> dict[Gradient, int | None]:
    """For each gradient that changes: the slot that holds it at the end, or None where it becomes None."""
    return {g: None if node is None else slot_of[node] for g, node in trace.gradients.items()}
