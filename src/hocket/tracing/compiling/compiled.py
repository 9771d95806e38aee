"""The compiled form of a captured step: the same step, whose ops are kernels and calls of torch.

The listing becomes a trace, with what every call reads and writes, and is lowered like any other: writes of parameters,
statistics and state keep the order that the checker sees, and a plan may put kernels on any lane.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from hocket import native
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.compiling.arguments import decoded, op_named
from hocket.tracing.compiling.listing import ListedCall, ListedTensor, Listing
from hocket.tracing.compiling.request import CompileRequest
from hocket.tracing.lowering.lower import WINOGRAD, lower
from hocket.tracing.recording.op_arguments import Note, written_arguments
from hocket.tracing.scalars.tape import TapeRef


def compiled_form(captured: Captured, request: CompileRequest, listings: tuple[Listing, Listing]) -> Captured:
    """The captured step in its compiled form, and in the same form in float64, if these belong together."""
    if not native.available():
        raise CaptureError(f"kernels are called natively: {native.available().why}")
    native.load()
    own, wide = (_formed(captured, request, listing, is_wide) for is_wide, listing in enumerate(listings))
    return replace(own, wide=wide)


def _formed(captured: Captured, request: CompileRequest, listing: Listing, is_wide: int) -> Captured:
    made = _FormTrace(captured, request, listing, bool(is_wide))
    try:
        made.put_all()
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(f"the compiled list does not fit: {type(error).__name__}: {error}") from None
    own = {"graph": made.graph, "sources": made.sources, "notes": made.notes, "roots": made.roots}
    trace = captured.trace.moved_to(made.left, **own, order=())
    lowered = lower(trace, split_backward=False, native_ops=() if is_wide else (WINOGRAD,))
    slots = {id(source): slot for slot, source in lowered.program.inputs.items()}
    old = captured.program.inputs
    return replace(
        captured,
        graph=lowered.graph,
        program=lowered.program,
        trace=trace,
        lowered=lowered,
        stand_ins={slots[id(old[slot])]: value for slot, value in captured.stand_ins.items()},
    )


@dataclass
class _FormTrace:
    """The trace of a listing, as it is put together."""

    captured: Captured
    request: CompileRequest
    listing: Listing
    is_wide: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    sources: dict[fx.Node, Any] = field(default_factory=dict)
    notes: dict[fx.Node, Note] = field(default_factory=dict)
    roots: dict[fx.Node, int] = field(default_factory=dict)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    by_slot: dict[int, fx.Node] = field(default_factory=dict)
    root_of: dict[fx.Node, int] = field(default_factory=dict)

    def put_all(self) -> None:
        values, inputs = self.listing.values, self.request.inputs
        places = {slot: value for value, slot in enumerate(inputs)}
        memory: dict[int, int] = {}  # of inputs that share it: the first one's
        # Unused inputs have separate memory, behind that of all values.
        for number, (old, source) in enumerate(self.captured.trace.sources.items()):
            slot = self.captured.lowered.slot_of[old]
            node = self.graph.placeholder(f"given{number}")
            self.sources[node], node.meta["val"] = source, old.meta["val"]
            own = places.get(slot, len(values) + number)
            self.roots[node] = memory.setdefault(self.captured.trace.roots[old], own)
            self.by_slot[slot] = node
            self.root_of[node] = self.roots[node]
            if slot in places:
                self.nodes[places[slot]] = node
        self._put_numbers(len(inputs))
        for event in self.listing.events:
            self._put(event)
        for slot, value in zip(self.request.outputs, self.listing.outputs, strict=True):
            node = old_node(self.captured, slot)
            self._expect_layout(node, values[value])
            self.by_slot[slot] = self.nodes[value]
            self.root_of[self.nodes[value]] = values[value].root
        for text in self.request.document["views"]:
            self._put_view(text)
        for text in self.request.document["updates"]:
            self._put_update(text)
        self.graph.output(())

    def left(self, node: fx.Node) -> fx.Node:
        """The node of what the step leaves where it left this one's value."""
        return self.by_slot[self.captured.lowered.slot_of[node]]

    def _put_numbers(self, value: int) -> None:
        """The op that the step begins with: it checks what it is given, and makes one vector of all numbers."""
        count = len(self.request.numbers)
        given = [self.nodes[n] for n in range(value)]
        layouts = torch.classes.hocket.Layouts([_text(self.listing.values[n]) for n in range(value)])
        node = self._call(torch.ops.hocket.checked_numbers.default, (layouts, given, [0.0] * count), {})
        node.meta["val"] = _meta(self.listing.values[value])
        scalars = {(0, 2, n): TapeRef(index) for n, index in enumerate(self.request.numbers)}
        root = self.listing.values[value].root
        reads = frozenset(self.listing.values[n].root for n in range(value))
        self.notes[node] = Note("forward", "", reads, returns=(root,), scalars=scalars)
        self.nodes[value] = node

    def _put(self, event: ListedCall) -> None:
        values = self.listing.values
        if event.order is None:
            func = op_named(event.op)
            args = tuple(decoded(each, self._leaf) for each in event.args)
            kwargs = {key: decoded(each, self._leaf) for key, each in event.kwargs.items()}
        else:
            func = torch.ops.hocket.kernel.default
            written = [event.given.index(value) for value in event.written]
            layouts = ([_text(values[v]) for v in event.given], [_text(values[v]) for _, v in event.outs])
            kernel = torch.classes.hocket.Kernel(
                str(self.listing.library), event.op, list(event.order), list(event.offsets), *layouts, written
            )
            args, kwargs = (kernel, [self.nodes[value] for value in event.given]), {}
        node = self._call(func, args, kwargs)
        if event.outs and event.outs[0][0] >= 0:
            node.meta["val"] = _by_position({position: _meta(values[value]) for position, value in event.outs})
        for made, value in self._results(node, event.outs):
            made.meta["val"] = _meta(values[value])
            self.nodes[value] = made
        returns = _by_position({max(position, 0): values[value].root for position, value in event.outs})
        random = torch.Tag.nondeterministic_seeded in func.tags
        reads, writes = (frozenset(values[v].root for v in each) for each in (event.given, event.written))
        self.notes[node] = Note(self._phase(event), "", reads, writes, returns, random)

    def _put_view(self, text: Mapping[str, Any]) -> None:
        """Views of a value that the step leaves or is given, as they were before."""
        args = tuple(decoded(each, self._slot_leaf) for each in text["args"])
        kwargs = {key: decoded(each, self._slot_leaf) for key, each in text["kwargs"].items()}
        node = self._call(op_named(text["op"]), args, kwargs)
        (base,) = (each for each in tree_leaves(args) if isinstance(each, fx.Node))
        root, dtype = self.root_of[base], base.meta["val"].dtype
        for made, slot in self._results(node, text["outs"]):
            value = old_node(self.captured, slot).meta["val"]
            made.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
            self.by_slot[slot], self.root_of[made] = made, root
        returns = _by_position({max(position, 0): root for position, _ in text["outs"]})
        self.notes[node] = Note("forward", "", frozenset((root,)), returns=returns)

    def _put_update(self, text: Mapping[str, Any]) -> None:
        func = op_named(text["op"])
        scalars: dict[tuple[Any, ...], TapeRef] = {}
        kwargs: dict[str, Any] = {}
        for key, each in text["kwargs"].items():
            if isinstance(each, dict) and "number" in each:
                scalars[1, key] = TapeRef(self.request.numbers[each["number"]])
            kwargs[key] = 0.0 if (1, key) in scalars else decoded(each, self._slot_leaf)
        args = tuple(decoded(each, self._slot_leaf) for each in text["args"])
        node = self._call(func, args, kwargs)
        reads, writes = (
            frozenset(self.root_of[each] for each in tree_leaves(list(nodes)) if isinstance(each, fx.Node))
            for nodes in ((args, tuple(kwargs.values())), written_arguments(func, args, kwargs))
        )
        self.notes[node] = Note("update", "", reads, writes, scalars=scalars)

    def _slot_leaf(self, kind: str, slot: int) -> Any:
        if kind != "value":
            raise CaptureError("an update is given a number among its tensors")
        return self.by_slot[slot]

    def _phase(self, event: ListedCall) -> str:
        """Return ``update`` for kernels that write inputs of the step. Otherwise unknown, so ``forward``."""
        own = {self.listing.values[value].root for value in event.written}
        return "update" if any(root < len(self.request.inputs) for root in own) else "forward"

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return self.graph.create_node("call_function", func, args, kwargs)

    def _results(self, node: fx.Node, outs: Iterable[tuple[int, int]]) -> Iterator[tuple[fx.Node, int]]:
        """A node for each result of an op, with the value or slot that it is."""
        for position, what in outs:
            yield node if position < 0 else self.graph.call_function(operator.getitem, (node, position)), what

    def _leaf(self, kind: str, index: int) -> Any:
        if kind != "value":
            raise CaptureError("a compiled list refers to a number")
        return self.nodes[index]

    def _expect_layout(self, node: fx.Node, found: ListedTensor) -> None:
        """Check that an output has the same layout as in the step that was not compiled."""
        value = node.meta["val"]
        strides = [(a, b) for n, a, b in zip(value.shape, value.stride(), found.stride, strict=True) if n > 1]
        if tuple(value.shape) != found.size or any(a != b for a, b in strides):
            raise CaptureError(f"{node.name} would be left in another layout: {found.size}, {found.stride}")
        if value.dtype is not found.dtype and not self.is_wide:
            raise CaptureError(f"{node.name} would be left in {found.dtype}")


def old_node(captured: Captured, slot: int) -> fx.Node:
    """A node of the captured trace whose value is in this slot."""
    return next(n for n, s in captured.lowered.slot_of.items() if s == slot and n.meta.get("val") is not None)


def _by_position(found: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(found.get(position) for position in range(1 + max(found, default=-1)))


def _text(layout: ListedTensor) -> tuple[list[int], list[int], torch.dtype]:
    return list(layout.size), list(layout.stride), layout.dtype


def _meta(layout: ListedTensor) -> torch.Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
