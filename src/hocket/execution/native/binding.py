"""Native reads and writes of a step's Python state, bound once so that no Python runs for them between calls.

They have to equal `Captured.begin` and `Captured.finish`, see ``native/binding.cpp``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.native import load
from hocket.tracing.bound_places import BoundPlaces
from hocket.tracing.captured import Captured
from hocket.tracing.recording.batch_reads import BatchNumber
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.sources import BatchLeaf, Constant, Entry, Gradient, ItemOf, LiveLeaf
from hocket.tracing.spent_graphs import SPENT, with_spent_graph
from hocket.tracing.standing import TensorKind

_SIGNS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"}
_KINDS = {"tensor": "d", "item": "i", "number": "n"}


class Binding:
    """A captured step bound to a native core, unless the core cannot read a place of the step, or its batch."""

    def __init__(self, captured: Captured, core: Any, batch: Any) -> None:
        self._captured = captured
        self._native = load().Binding(core, batch)
        self._places = BoundPlaces(self._native)
        self._guards = captured.trace.batch_guards if captured.trace.batch_guards.parts else None
        self._check_batch(batch)
        self._add_inputs()
        self._add_tape()
        for gradient in captured.unread_gradients:
            self._native.add_unread_gradient(self._parameter(gradient))
        for gradient, slot in captured.gradients:
            self._native.add_gradient(self._parameter(gradient), -1 if slot is None else slot)
        for kind, place, name in captured.results:
            grad_kind = None if name is None else "g" if name else "l"
            self._native.add_result(grad_kind or _KINDS[kind], place, name or "", SPENT)
        for _, slot in captured.rebound:
            self._native.add_result("t", slot, "", "")
        for reference in captured.trace.numbers.values():
            self._native.add_result("n", reference.index, "", "")
        self._is_plain = not captured.rebound and not captured.trace.numbers and not captured.trace.effects
        self._unproven: frozenset[int] | None = None

    def begin(self, batch: Any) -> bool:
        """Read the inputs of the step. Return False if `Captured.begin` has to report a difference."""
        self._expect_numbers()
        read: list[Any] | None = []
        if self._guards is not None:
            read = self._guards.evaluate(self._native.leaves(batch)) if self._native.fits(batch) else None
        return read is not None and bool(self._native.begin(batch, read))

    def finish(self) -> Any:
        """Put everything in its place, and return what the step returns."""
        return self._returned(self._native.finish())

    def boxed(self, condition: Any, passed: Sequence[int], constants: list[Any], order: Sequence[int], num: int) -> Any:
        """The step as a native call on a list of inputs, which is emptied before the first op.

        None where Python has more to read or to put back. The call answers NotImplemented, with nothing changed, where
        the native `condition` on the inputs does not hold, and after `num` calls. `order` has of each output the
        position in: leaves of the step's result, then inputs that are returned (at the positions `passed`), then
        `constants`.
        """
        num_leaves = len(self._captured.trace.result.leaves)
        if not self._is_plain or self._guards is not None or num_leaves != len(self._captured.results):
            return None
        self._expect_numbers()
        return load().BoxedCall(condition, self._native, list(passed), constants, list(order), num)

    def direct(self, conditions: Sequence[Any], num_calls: int) -> Any:
        """Whole steps as native calls under these native conditions, called like the executor.

        None where Python has more to do in a step. A call returns NotImplemented, with nothing changed, if `begin` or a
        condition fails, and after `num_calls`. Its ``times_ms()`` are the durations of the calls.
        """
        if self._guards is not None or self._captured.trace.undo is not None:
            return None
        self._expect_numbers()
        returned = None if self._is_plain and self._captured.returns_one else self._returned
        return load().DirectCall(list(conditions), self._native, returned, num_calls)

    def _expect_numbers(self) -> None:
        """Have the native tape ask of unproven numbers whether they are as recorded."""
        unproven = self._captured.trace.tape.asked
        if unproven != self._unproven:
            self._native.expect_numbers(sorted(unproven))
            self._unproven = unproven

    def _returned(self, found: list[Any]) -> Any:
        captured = self._captured
        if not self._is_plain:
            further = iter(found[len(captured.results) :])
            for entry, _ in captured.rebound:
                value = next(further)
                name = captured.trace.with_grad.get(entry)
                entry.set(value if name is None else with_spent_graph(value.detach(), name))
            for number in captured.trace.numbers:
                number.set(next(further))
        return captured.returned(found)

    def _check_batch(self, batch: Any) -> None:
        leaves, _ = tree_flatten(batch)
        seen = self._native.leaves(batch)
        if len(seen) != len(leaves) or any(a is not b for a, b in zip(seen, leaves, strict=True)):
            raise TypeError("torch's pytree sees another tree in this batch")

    def _add_inputs(self) -> None:
        standing = self._captured.standing
        memory = dict(zip(standing.slots, standing.first, strict=True))
        inputs = self._captured.inputs
        for slot, source in inputs:
            if slot in standing.kinds and TensorKind.of(source.get()) != standing.kinds[slot]:
                raise TypeError(f"{source.name} is of another kind")
            if isinstance(source, BatchLeaf):
                self._native.add_batch_input(slot, source.index, memory[slot])
        for slot, source in inputs:
            if isinstance(source, Constant):
                self._native.add_input(slot, self._places.object(source.value), memory[slot])
            elif isinstance(source, Entry):
                self._native.add_input(slot, self._places.add(source), memory[slot])
        for slot, source in inputs:
            if isinstance(source, Gradient):
                self._native.add_gradient_input(slot, self._parameter(source), memory[slot])
        for one, other in standing.twins:
            self._native.add_twins(self._places.add(one), self._places.add(other))

    def _add_tape(self) -> None:
        tape = self._captured.trace.tape
        for function, operands in tape.entries:
            if function is None:
                self._native.add_number(*self._leaf(tape.leaves[operands]), tape.found[operands])
            else:
                arguments = [("n", o.index) if type(o) is TapeRef else ("c", o) for o in operands]
                self._native.add_entry(_SIGNS.get(function, " "), function, arguments)
        for entry, outcome in tape.guards:
            self._native.add_guard(entry, outcome)

    def _leaf(self, leaf: Any) -> tuple[str, int]:
        if isinstance(leaf, BatchNumber):
            return "g", leaf.position
        if isinstance(leaf, LiveLeaf):
            return "b", leaf.index
        if isinstance(leaf, ItemOf):
            return "i", self._places.add(leaf.source)
        if isinstance(leaf, Entry):
            return "p", self._places.add(leaf)
        raise TypeError(f"a leaf of the tape that is a {type(leaf).__name__}")

    def _parameter(self, gradient: Gradient) -> int:
        if type(gradient.parameter.get()) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{gradient.parameter.name} has attributes of its own")
        return self._places.add(gradient.parameter)
