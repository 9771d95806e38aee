"""`Captured`: a step that became a graph, and what it takes to run it again on live state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.errors import CaptureError
from hocket.heap import collections_held
from hocket.interrupts import held_interrupts
from hocket.ir import Graph
from hocket.pystate.places import as_it_stands
from hocket.sinks import run_sinks
from hocket.tracing.lowering.lower import Lowered, lower
from hocket.tracing.program import Program, compile_action
from hocket.tracing.recording.batch_reads import BatchNumber
from hocket.tracing.recording.trace import Trace
from hocket.tracing.signature import signature_of
from hocket.tracing.sources import BatchLeaf, Entry, Gradient, LiveLeaf
from hocket.tracing.spent_graphs import with_spent_graph
from hocket.tracing.standing import Standing, value_now

# Kinds of results that are handed over as tensors.
_PLAINLY = {"array": "tensor", "scalar": "tensor"}
# Tracing replaces functions of torch and of `math` for the whole process, and puts back what it found.
_ONE_AT_A_TIME = threading.RLock()


@dataclass
class Frame:
    """The working memory of one step: a value for each slot, and the numbers of the tape."""

    values: list[Any]
    numbers: list[Any]


@dataclass
class ExampleBatch:
    """The batch that a step was captured with, or a later one, or None once it was let go of."""

    value: Any


@dataclass(frozen=True, eq=False)
class Captured:
    """One training step as a graph, bound to the model and the optimizer it came from.

    Attributes:
        graph: the ops, their roles, and what must come before what.
        program: the same ops for an executor.
        step: the user's own step.
        example: the batch it was captured with. All forms of a step share it.
        trace: what the recorders saw.
        lowered: which slot holds which value of the trace.
        signature: what must be so again for the graph to stand for the step.
        stand_ins: state that the optimizer had not made yet when the step was captured, for timing only.
        wide: of a compiled step the same one compiled in float64, to be compared with eager in float64.
    """

    graph: Graph
    program: Program
    step: Callable[[Any], Any]
    example: ExampleBatch
    trace: Trace
    lowered: Lowered
    signature: tuple[Any, ...]
    stand_ins: dict[int, torch.Tensor]
    wide: Captured | None = None

    @property
    def batch(self) -> Any:
        """The batch it was captured with."""
        return self.example.value

    def fits(self, batch: Any) -> bool:
        """Return whether this graph may replace ``step(batch)`` now: same shapes, modes and gradients present.

        A number of the batch that the graph follows may be another one.
        """
        followed = {leaf.index for leaf in self.trace.tape.leaves if type(leaf) is LiveLeaf}
        others = [place for place, leaf in enumerate(tree_flatten(batch)[0]) if not isinstance(leaf, torch.Tensor)]
        live = [number for number, place in enumerate(others) if place in followed]
        before, shapes, values, *rest = self.signature
        values = tuple((kind, None if place in live else value) for place, (kind, value) in enumerate(values))
        return signature_of(self.trace.places, batch, live) == (before, shapes, values, *rest)

    def begin(self, batch: Any, *, prologue: bool = True) -> Frame | None:
        """Read all inputs and numbers. Return None if the graph is not valid for the step now (see `holds`)."""
        leaves, _ = tree_flatten(batch)
        values = self._read_inputs(leaves)
        if values is None:
            return None
        numbers = self._numbers_of(leaves)
        if numbers is None:
            return None
        for gradient in self.unread_gradients:
            # As eager's zero_grad does: the old gradient's memory is free during the step.
            gradient.set(None)
        return self._started(values, numbers) if prologue else Frame(values, numbers)

    def holds(self, batch: Any) -> bool:
        """Return whether the graph is valid for a step with this batch now.

        All its inputs exist, and tensors have the type, layout and shared memory of the capture. Numbers have the same
        types, branches the same outcome, and no number has another value that was never compared with eager.
        """
        leaves, _ = tree_flatten(batch)
        return self._read_inputs(leaves) is not None and self._numbers_of(leaves) is not None

    def why_not(self, batch: Any) -> str:
        """Why the graph does not stand for a step with this batch now. Empty if it does."""
        leaves, _ = tree_flatten(batch)
        for _, source in self.inputs:
            if isinstance(source, (Entry, Gradient)) and _is_gone(source):
                return f"there is no {source.name} yet: run one eager step before the planned ones"
        if self._read_inputs(leaves) is None:
            return self.standing.why_not(dict(self.inputs))
        if self.trace.batch_guards.evaluate(leaves) is None:
            return "a value of its batch that it branches on, or the number of elements that it selects, has changed"
        if self._numbers_of(leaves) is None:
            return self.trace.tape.why_not(self._read_numbers(leaves))
        return ""

    @property
    def lacks_state(self) -> bool:
        """Return whether optimizer state that the step reads, or a gradient that it adds to, is missing."""
        return any(
            source.kind in ("state", "gradient") and _is_gone(source)
            for _, source in self.inputs
            if isinstance(source, (Entry, Gradient))
        )

    def moved(self, batch: Any) -> set[int]:
        """Leaves of the tape that keep the graph from standing for this step, and would not if they were proven."""
        leaves, _ = tree_flatten(batch)
        read = self._read_numbers(leaves)
        if read is None or self._read_inputs(leaves) is None or self.trace.tape.evaluate(read) is None:
            return set()
        return self.trace.tape.moved(read)

    def numbers(self, batch: Any) -> list[Any] | None:
        """Return the values of the tape for a step with this batch now, or None if a guard on them fails."""
        return self._numbers_of(tree_flatten(batch)[0])

    def rehearse(self) -> Frame:
        """A frame on copies of everything: it can be run and thrown away, and nothing of the user's changes."""
        copies = {slot: self._copied(slot, source) for slot, source in self.inputs}
        read = self.trace.batch_guards.evaluate(tree_flatten(self.batch)[0])
        found = zip(self.trace.tape.leaves, self.trace.tape.found, strict=True)
        numbers = (
            None if read is None else self.trace.tape.evaluate([self._number(x, value, read) for x, value in found])
        )
        if numbers is None:  # the step takes another branch now: as it was recorded
            numbers = self.trace.tape.evaluate(self.trace.tape.found)
        if numbers is None:
            raise CaptureError("the numbers of the optimizer changed since the step was captured; capture it again")
        values = [copies.get(slot) for slot in range(self.program.num_slots)]
        return self._started(values, numbers)

    def finish(self, frame: Frame) -> Any:
        """Put gradients, rebound state and numbers in their places, and return what the step returns."""
        values, numbers = frame.values, frame.numbers
        for gradient, slot in self.gradients:
            gradient.set(None if slot is None else _detached(values[slot]))
        for entry, slot in self.rebound:
            value = _detached(values[slot])
            name = self.trace.with_grad.get(entry)
            entry.set(value if name is None else with_spent_graph(value.detach(), name))
        for number, reference in self.trace.numbers.items():
            number.set(numbers[reference.index])
        found: list[Any] = []
        for kind, place, grad_name in self.results:
            if kind == "number":
                found.append(numbers[place])
                continue
            # Detached: memory of the step must not leave as the tensor that the next step works on.
            value = values[place].detach()
            if grad_name is not None:
                value = with_spent_graph(value, grad_name)
            found.append(value.item() if kind == "item" else value)
        return self.returned(found)

    def returned(self, found: Sequence[Any]) -> Any:
        """Build the step's result from the values of `results`, and append to the lists that the step extends."""
        made: dict[int, Any] = {}
        for entry, value in self.trace.effects.items():
            entry.set(as_it_stands(value, made))
        if self.returns_one:
            return found[0]
        late = self.late_values(found)
        for entry, reference in self.trace.late_numbers.items():
            entry.set(late[reference.index])
        leaves = self.trace.result.filled(found, late, lambda source: source.get())
        result, added, *further = tree_unflatten(leaves, self.trace.result.spec)
        for each, new in zip(self.trace.appended, added, strict=True):
            each.target.extend(new)
        if self.trace.sinks:
            run_sinks(self.trace.sinks, further[0])
        return result

    def late_values(self, found: Sequence[Any]) -> list[Any]:
        """Values of the late tape, whose inputs are the last of the `results`."""
        late = self.trace.late
        num_inputs = sum(function is None for function, _ in late.entries)
        end = len(self.results)  # values of places may follow
        return late.evaluate(found[end - num_inputs : end]) if num_inputs else []

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that outlives the step, by name: parameters, buffers, optimizer state, as they are now."""
        places = self.trace.places
        return {entry.name: entry.get() for entry in (*places.parameters, *places.tensors)}

    def written(self, batch: Any) -> list[torch.Tensor]:
        """The live tensors from outside that a step with this batch writes in place."""
        leaves, _ = tree_flatten(batch)
        sources = [source for slot, source in self.inputs if slot in self.written_slots]
        found = [leaves[source.index] if type(source) is BatchLeaf else source.get() for source in sources]
        return [tensor for tensor in found if tensor is not None]

    @cached_property
    def written_slots(self) -> frozenset[int]:
        """Slots of inputs whose memory an op writes."""
        written = {root for note in self.trace.notes.values() for root in note.writes}
        return frozenset(self.lowered.slot_of[node] for node, root in self.trace.roots.items() if root in written)

    def _read_inputs(self, batch: list[Any]) -> list[Any] | None:
        """Return a value for each slot that is read from outside, or None if one has changed or is missing."""
        values: list[Any] = [None] * self.program.num_slots
        try:
            for slot, source in self.inputs:
                values[slot] = batch[source.index] if type(source) is BatchLeaf else source.get()
        except (LookupError, AttributeError, TypeError):
            return None
        return values if self.standing.holds(values) else None

    def _read_numbers(self, batch: list[Any]) -> list[Any] | None:
        """The leaves of the tape. None where one is of another type, or a read of the batch turns out otherwise."""
        of_batch = self.trace.batch_guards.evaluate(batch)
        if of_batch is None:
            return None
        tape = self.trace.tape
        try:
            read = [_read(leaf, batch, of_batch) for leaf in tape.leaves]
        except (AttributeError, LookupError, RuntimeError, TypeError):
            return None  # nothing there, a number where there was a pair or a tensor, or a row where there was a number
        return read if [type(number) for number in read] == [type(number) for number in tape.found] else None

    def _numbers_of(self, batch: list[Any]) -> list[Any] | None:
        """Return the values of the tape, or None if a guard fails or an unverified leaf has changed."""
        read, tape = self._read_numbers(batch), self.trace.tape
        if read is None or (not tape.trusting and tape.moved(read)):
            return None
        return self.trace.tape.evaluate(read)

    def _started(self, values: list[Any], numbers: list[Any]) -> Frame:
        with torch.no_grad():
            self._prologue(values, numbers)
        return Frame(values, numbers)

    def _copied(self, slot: int, source: Any) -> Any:
        if slot in self.stand_ins:
            return self.stand_ins[slot].detach().clone()
        value = tree_flatten(self.batch)[0][source.index] if type(source) is BatchLeaf else value_now(source)
        kind = self.standing.kinds.get(slot)
        if value is None and kind is not None:  # a gradient to be added to, where there is none at the moment
            return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device).zero_()
        if value.numel() and not value.untyped_storage().nbytes():
            raise CaptureError("the memory of an input was freed")
        return value.detach().clone()

    def _number(self, leaf: Any, found: Any, of_batch: list[Any]) -> Any:
        try:
            return _read(leaf, tree_flatten(self.batch)[0], of_batch)
        except KeyError:
            return found  # a step count that is not there yet: the first step is the one being timed

    @cached_property
    def _prologue(self) -> Callable[[list[Any], list[Any]], None]:
        return compile_action(self.program.prologue)

    @cached_property
    def inputs(self) -> tuple[tuple[int, Any], ...]:
        """Slot and source of everything that the program reads from outside."""
        read = {slot for action in (*self.program.actions, self.program.prologue) for slot in action.reads}
        return tuple((s, source) for s, source in self.program.inputs.items() if s in read or s in self.program.kept)

    @cached_property
    def standing(self) -> Standing:
        """Conditions on the tensors that the program reads."""
        roots = {self.lowered.slot_of[node]: root for node, root in self.trace.roots.items()}
        kinds = {slot: self.trace.kinds[source] for slot, source in self.inputs if type(source) is not BatchLeaf}
        slots = tuple(slot for slot, _ in self.inputs)
        places = {roots[slot]: place for place, slot in reversed(list(enumerate(slots)))}
        return Standing(kinds, slots, tuple(places[roots[slot]] for slot in slots), self.trace.places.twins)

    @cached_property
    def gradients(self) -> tuple[tuple[Gradient, int | None], ...]:
        slot_of = self.lowered.slot_of
        return tuple((g, None if n is None else slot_of[n]) for g, n in self.trace.gradients.items())

    @cached_property
    def rebound(self) -> tuple[tuple[Entry, int], ...]:
        return tuple((entry, self.lowered.slot_of[node]) for entry, node in self.trace.rebound.items())

    @cached_property
    def results(self) -> tuple[tuple[str, int, str | None], ...]:
        """Sources of the result's leaves: a tensor or the number (``item``) in a slot, or an entry of the tape.

        With the name of the autograd node that the tensor has, if it requires a gradient.
        """
        slot_of, names = self.lowered.slot_of, self.trace.result.grad_names
        return tuple(
            (_PLAINLY.get(kind, kind), leaf.index if kind == "number" else slot_of[leaf], names.get(position))
            for position, (kind, leaf) in enumerate(self.trace.result.leaves)
            if kind not in ("value", "place", "late", "again")
        )

    @cached_property
    def returns_one(self) -> bool:
        """Return whether the result is one tensor or number, and nothing is appended."""
        kinds = [kind for kind, _ in self.trace.result.leaves]
        alone = not self.trace.appended and len(kinds) == len(self.results) == 1 and kinds[0] not in _PLAINLY
        return alone and bool(self.trace.result.spec == tree_flatten((0, []))[1])

    @cached_property
    def read_gradients(self) -> tuple[Gradient, ...]:
        return tuple(source for _, source in self.inputs if type(source) is Gradient)

    @cached_property
    def unread_gradients(self) -> tuple[Gradient, ...]:
        read = {id(source) for _, source in self.inputs}
        return tuple(gradient for gradient, _ in self.gradients if id(gradient) not in read)


@contextmanager
def alone() -> Iterator[None]:
    """Record a step: Ctrl-C, Python's collector and other recordings wait."""
    with held_interrupts(), _ONE_AT_A_TIME, collections_held():
        yield


def captured_from(
    trace: Trace,
    signature: tuple[Any, ...],
    step: Callable[[Any], Any],
    batch: Any,
    *,
    split: bool = False,
    pays: Callable[[str, str], bool] | None = None,
    made: Mapping[Any, torch.Tensor] | None = None,
) -> Captured:
    """The captured step of a trace, with the signature from before the call. `made` is state that was not there yet."""
    lowered = lower(trace, split_backward=split, pays=pays)
    made = made or {}
    stand_ins = {slot: made[source] for slot, source in lowered.program.inputs.items() if source in made}
    return Captured(lowered.graph, lowered.program, step, ExampleBatch(batch), trace, lowered, signature, stand_ins)


def relowered(captured: Captured, *, split: bool, native_ops: Any = None) -> Captured:
    """Lower a captured step again, with its convolutions' backward split, or with native ops."""
    native_ops = captured.lowered.native_ops if native_ops is None else native_ops
    lowered = lower(captured.trace, split_backward=split, native_ops=native_ops)
    stand_ins = {slot: captured.stand_ins[slot] for slot in lowered.program.inputs if slot in captured.stand_ins}
    return replace(captured, graph=lowered.graph, program=lowered.program, lowered=lowered, stand_ins=stand_ins)


def _detached(value: torch.Tensor) -> torch.Tensor:
    """The value, tied to no parameter of which the program has left out a `detach`, and no view, as gradients are."""
    return value.detach() if value.requires_grad or value._is_view() else value


def _read(leaf: Any, batch: list[Any], of_batch: list[Any]) -> Any:
    if type(leaf) is BatchNumber:
        return of_batch[leaf.position]
    return batch[leaf.index] if type(leaf) is LiveLeaf else leaf.get()


def _is_gone(source: Entry | Gradient) -> bool:
    """True if there is nothing at a place that a step could fill: not where the parameter itself is gone."""
    try:
        has_owner = not isinstance(source, Gradient) or isinstance(source.parameter.get(), torch.Tensor)
        return has_owner and source.get() is None
    except LookupError:
        return not isinstance(source, Gradient)
