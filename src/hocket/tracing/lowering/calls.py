"""The calls of a trace, as the passes of `lower` work on them: what is called, what is known of it, in which slots."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from hocket.tracing.lowering.dependencies import Access
from hocket.tracing.program import Call, Slot
from hocket.tracing.raising import is_foreign, may_raise
from hocket.tracing.recording.op_arguments import Note, filled_arguments

_aten = torch.ops.aten
_EMPTY = (_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default)
_FILLS = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}


@dataclass(frozen=True)
class AnnotatedCall:
    """A call with what is known of it: the note of the watch, its size, the part of a split op."""

    call: Call
    note: Note
    flops: float
    part: str = ""
    views: tuple[Call, ...] = ()

    @property
    def access(self) -> Access:
        """A fresh result is a root that the op writes, since no other op can read it earlier."""
        return Access(self.note.reads, self.note.writes | self.note.fresh, self.note.random)

    @property
    def memory(self) -> frozenset[int]:
        """The roots that it touches."""
        return self.note.reads | self.note.writes | self.note.fresh

    @property
    def target(self) -> str:
        return str(getattr(self.call.func, "_overloadpacket", self.call.func))

    @property
    def kernel(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def may_raise(self) -> bool:
        """True if it may raise for its values. Of others' ops those that return nothing are there to check."""
        return may_raise(self.kernel) or (is_foreign(self.call.func) and not self.note.returns)

    def made_by(self, call: Call, roots: Sequence[int | None], writes: frozenset[int] = frozenset()) -> AnnotatedCall:
        """Another call in its place, which writes these roots of what it is given."""
        reads = frozenset(root for slot in call.reads if (root := roots[slot]) is not None)
        last = max((place or 0 for place in call.outs), default=-1)
        slots = [call.outs.get(place, call.outs.get(None)) for place in range(last + 1)]
        returns = tuple(None if slot is None else roots[slot] for slot in slots)
        return replace(self, call=call, note=replace(self.note, reads=reads, writes=writes, returns=returns))


@dataclass
class StepCalls:
    """The calls of a step in their order, as passes see them that put native ops in place of some."""

    pieces: Sequence[AnnotatedCall]
    values: Mapping[int, Any]  # fake tensors by slot
    roots: Sequence[int | None]  # by slot
    kept: frozenset[int]  # slots that are needed after the step

    @cached_property
    def touching(self) -> Mapping[int | None, Sequence[int]]:
        """Positions of the calls that touch each root."""
        found: dict[int | None, list[int]] = defaultdict(list)
        for position, piece in enumerate(self.pieces):
            for root in piece.memory:
                found[root].append(position)
        return found

    @cached_property
    def raising(self) -> Sequence[int]:
        """Positions of the calls that may raise."""
        return [n for n, piece in enumerate(self.pieces) if piece.may_raise or piece.note.is_undone]


@dataclass
class SlotTable:
    """Numbers for the values of a trace, with their size and root."""

    of: dict[fx.Node, int] = field(default_factory=dict)
    size_bytes: list[float] = field(default_factory=list)
    root: list[int | None] = field(default_factory=list)

    def new(self, value: Any, root: int | None) -> int:
        self.size_bytes.append(_size_bytes(value))
        self.root.append(root)
        return len(self.root) - 1


def annotated_call(node: fx.Node, note: Note, slots: SlotTable) -> AnnotatedCall:
    """Make the call of a node. Its results get slots, unless they have one already."""
    func: Any = node.target
    value = node.meta.get("val")
    args, kwargs = filled_arguments(node, note, lambda each: Slot(slots.of[each]), lambda number: number)
    shaped = without_data(func, value)
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
    return AnnotatedCall(Call(func, args, kwargs, outs), note, _flops(func, *_values(node), value))


# These make no value of their own: a reader of the result reads the argument.
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _same_value(func: Any, node: fx.Node, slots: SlotTable) -> int | None:
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


def _size_bytes(value: Any) -> float:
    return float(sum(math.prod(v.shape) * v.element_size() for v in tree_iter(value) if isinstance(v, torch.Tensor)))


def without_data(func: Any, value: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return a call (function, arguments, keywords) that makes the same result from its shape alone, or None.

    `empty_like(x)` waits for `x` only as long as its shape is not known, and in a captured step all shapes are known.
    Dropout draws its mask into an `empty_like` of its input, so masks can then be drawn ahead, beside other ops::

        before   x --> empty_like --> bernoulli_ --> mul      the mask can be drawn only when x is there
        after             empty   --> bernoulli_ --> mul
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return None
    size, kwargs = list(value.shape), {"dtype": value.dtype, "device": value.device}
    if func in _EMPTY:
        return _aten.empty_strided.default, (size, list(value.stride())), kwargs
    if func in _FILLS and value.is_contiguous():
        return _aten.full.default, (size, _FILLS[func]), kwargs
    return None


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the floating-point operations of ``func(*args, **kwargs) == result``. The tensors may be fake.

    Matrix products, convolutions and attention follow the formulas of `torch.utils.flop_counter`. Other ops count one
    operation for each output element, which is right within a small factor for ops that memory traffic dominates.
    """
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    return float(sum(math.prod(value.shape) for value in tree_iter(result) if hasattr(value, "shape")))
