"""One whole step (forward, loss, backward, update) as one ATen graph, recorded while the step runs for real.

The user's step runs once, as always: ops compute on the real parameters, and Python's side effects happen. Recorders
look on (`op_recorder`, `function_recorder`). Every number that changes between steps has its true value and remembers
how it was computed (`hocket.tracing.scalars`). What a graph cannot hold is a reason not to capture the step, which goes
on as if it were not watched.

What was baked into the graph out of sight shows in the steps that follow, which have other values: they are made by
eager and, from the same state, by the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.arguments import Unfolded, is_size
from hocket.pystate.appended import AppendedList, recorded_lists
from hocket.pystate.batches import folded, holds_arrays
from hocket.pystate.findings import codes_of, line_about
from hocket.pystate.origins import step_line, user_line
from hocket.pystate.places import as_it_stands, is_a, is_empty, is_number, is_plain, keeps_graph, same, shown
from hocket.pystate.plain_code import plain_code
from hocket.sinks import Sink, sinks_heard, sinks_held
from hocket.tracing.reasons import Reasons
from hocket.tracing.recording.array_calls import numpy_followed
from hocket.tracing.recording.array_tape import ArrayTape
from hocket.tracing.recording.exits import exits_noted, random_as_ops, renaming_noted
from hocket.tracing.recording.function_recorder import FunctionRecorder, python_functions_open
from hocket.tracing.recording.held import Containers, HeldNumbers, OutsideLeaves
from hocket.tracing.recording.module_tracker import ModuleTracker
from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.recording.outcomes import Outcomes
from hocket.tracing.recording.returned import returned_leaf
from hocket.tracing.recording.step_arrays import StepNumber, plain_arrays
from hocket.tracing.recording.step_counts import StepCounts
from hocket.tracing.recording.trace import Recorded, Result, Trace, UpdateCall, twins_of
from hocket.tracing.saved_state import KnownState
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.live import Late, Live, plain_of
from hocket.tracing.scalars.plain import plain_result, replace_by_plain, settled_result
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.signature import is_live
from hocket.tracing.sources import PLAIN, BatchLeaf, Entry, Gradient, LiveLeaf, Memory
from hocket.tracing.standing import TensorKind, value_now
from hocket.tracing.state import Inventory


def record_step(
    step: Callable[[Any], Any],
    places: Inventory,
    batch: Any,
    *,
    appended: Sequence[AppendedList] = (),
    live_leaves: Collection[int] = (),
    settles: bool = False,
    undoes: bool = False,
    owned: Collection[int] = (),
    arrays: bool = False,
) -> Recorded:
    """Run ``step(batch)`` once and record it.

    Args:
        step: the user's own.
        places: of what it reads and writes. Optimizers have made their state (they do so in the first step).
        batch: what the step is called with.
        appended: lists that it appends to.
        live_leaves: leaves of the batch, counted among those that are no tensors, whose number changes between batches.
        settles: hand out plain numbers. The graph is good for all values that the step could read of them.
        undoes: put all tensors that the step wrote, gradients, numbers and random state back when it is over. The step
            ends where it does what a graph cannot hold.
        owned: addresses of lists and dicts that outlive the step. Where it returns one, a planned step returns it, too.
        arrays: arrays of the batch are followed, and those that it makes of its tensors.
    """
    recording = _Recording(places, batch, appended, live_leaves, undoes, owned, arrays)
    recording.tape.follows = not settles
    for leaf in recording.leaves:
        if not isinstance(leaf, (torch.Tensor, *PLAIN)):
            recording.reasons.add("batch unseen", f"{type(leaf).__module__}.{type(leaf).__name__}", step_line(step))
            return Recorded(step(batch), None, recording.reasons.first)
    for source, tensor in zip(recording.sources, recording.tensors, strict=True):
        if is_traceable_wrapper_subclass(tensor):
            recording.reasons.add("wraps tensors", f"{source.name}, a {type(tensor).__name__}", step_line(step))
        elif tensor.layout is not torch.strided:
            recording.reasons.add("uses a layout", f"{source.name}, which is {tensor.layout}", step_line(step))
    if recording.reasons:
        return Recorded(step(batch), None, recording.reasons.first)
    return recording.run(step)


class _Recording:
    """One step while it is recorded: what there was before it, and the recorders."""

    def __init__(
        self,
        places: Inventory,
        batch: Any,
        appended: Sequence[AppendedList],
        live_leaves: Collection[int],
        undoes: bool,
        owned: Collection[int],
        arrays: bool,
    ) -> None:
        self.appended, self.undoes, self.owned = tuple(appended), undoes, owned
        self.leaves, self.spec = tree_flatten(batch)
        self.batch = batch
        self.batch_before = batch if type(batch) is Unfolded else tree_unflatten(self.leaves, self.spec)
        self.live_leaves = live_leaves
        self.tape = Tape(reasons=Reasons(raises=undoes))
        self.reasons = self.tape.reasons
        self.late = LateTape(tape=self.tape, follows=not undoes, has_whole=places.follows)
        self.sinks: list[Sink] = []
        self.calls, self.line_of_sinks = list[Any](), ""
        self.gradients = [Gradient(entry) for entry in places.parameters]
        sources: list[Any] = [*places.parameters, *places.tensors]
        sources += [gradient for gradient in self.gradients if gradient.get() is not None]
        self.before = {source: source.get() for source in sources}
        self.places = replace(places, twins=[*places.twins, *twins_of(self.before)])
        self.sources = [*sources, *(BatchLeaf(i) for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor))]
        self.tensors = [*self.before.values(), *(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))]
        self.kinds = {s: TensorKind.of(t) for s, t in zip(self.sources, self.tensors, strict=True)}
        self.numbers = HeldNumbers(places.numbers, self.tape)
        self.plain = {entry: entry.get() for entry in places.plain}
        made: dict[int, Any] = {}
        self.kept = {entry: as_it_stands(value, made) for entry, value in self.plain.items()}
        self.keys = places.state_keys()
        self.updates: list[UpdateCall] = []
        self.outside = OutsideLeaves(self.leaves, self.before)
        self.known = KnownState(places, self.tensors)
        self.arrays = ArrayTape(self.reasons, arrays and not undoes, self.known.has_cuda)

    def _refuse(self, kind: str, subject: str, where: Entry | None) -> None:
        """Note a reason with the line of the step that writes a place, or that returns."""
        place = getattr(where and where.table, "place", None)
        written = line_about(place, codes_of(self.step)) if place else ""
        self.reasons.add(kind, subject, written or (self.line if where else step_line(self.step, returns=True)))

    def _refuse_set(self, entry: Entry, value: Any) -> None:
        self._refuse("sets a value", f"{entry.name} to {shown(plain_of(value))}", entry)

    def run(self, step: Callable[[Any], Any]) -> Recorded:
        self.step, self.line = step, step_line(step)
        where = ModuleTracker(self.places.paths, self.places.optimizers)
        plain_numbers = partial(self.numbers.plain, partial(self.reasons.add, "counts in an op"))  # a plan runs the op
        self.ops = ops = OpRecorder(where, self.tape, plain_numbers, self._effects_now, self.places.generators)
        ops.undoes = self.undoes
        for source, tensor in zip(self.sources, self.tensors, strict=True):
            node = ops.add_source(source, tensor)
            if not isinstance(source, BatchLeaf):
                ops.batch.lose([ops.roots[node]])
        where.on_update = self._note_update
        counts = StepCounts(self.tape, ops, self.sources, self.tensors)
        gradients = ((s, t) for s, t in self.before.items() if isinstance(s, Gradient))
        self.outcomes = Outcomes(ops, self.late, gradients, self._waits)
        if not self.undoes:  # else there is no eager step to be made in its place
            self.outcomes.follow(sys._getframe())
            self.arrays.may_branch = partial(self.outcomes.may_branch, self.known.has_cuda)
            self.arrays.outcome_of = self.outcomes.of
        self.arrays.writers, self.arrays.stand_for = ops.writers_of, ops.stand_for
        kept: list[Any] = []
        with ExitStack() as stack:
            if self.undoes:
                stack.callback(self._undo)
            stack.callback(lambda: kept.extend(self.tape.close()))
            stack.callback(lambda: kept.extend(replace_by_plain(self.arrays.handed_out, plain_arrays)))
            if self.arrays.follows:
                stack.enter_context(numpy_followed(self.arrays))
            stack.callback(self.numbers.put_back, self.undoes)
            stack.callback(where.close)
            with followed_math(), exits_noted(self.reasons), renaming_noted(ops.name_alike), python_functions_open():
                self.numbers.begin()
                self.containers = Containers(self.places, self.owned, self._refuse)
                recorder = FunctionRecorder(ops, self.tape, counts, self.late, self.arrays)
                with (
                    sinks_held() if self.undoes else sinks_heard(self._note_sink),
                    recorded_lists(self.appended, partial(self.reasons.add, "reads an appended list")) as added,
                    ops,
                    recorder,
                    random_as_ops(not self.known.has_cuda),
                    plain_code(partial(self.reasons.add, "calls functions")),
                    ExitStack() as rest,
                ):
                    ops.rest = None if self.undoes else rest  # else all that it writes has to be seen
                    result = step(self._batch())
                    ops.refuse_rewound("its end")
                    self.arrays.end()
            self.outside.note(self.reasons, self.line)
            further = {id(place.owner) for place in self.places.further}  # the step may have written it before
            for position in [at for table, at in self.tape.looked_up if id(table) in further]:
                self.tape.settle(position)
            self.tape.looked_up.clear()
            leaves = tuple(leaf.tensor for leaf in ops.leaves if leaf.has_changed)
            self.made = self.places.again().state_keys() ^ self.keys
            found = self._trace(result, added)  # with changed leaves it is recorded again, with those in their places
            plain, reason = settled_result(plain_arrays(result)), self.reasons.first
            return Recorded(plain, None if leaves else found, reason, leaves, bool(self.made), self.batch_before, kept)

    def _is_leaf(self, value: Any) -> bool:
        return is_size(value) or self.containers.leaf(value) is not None

    def _note_sink(self, sink: Sink, make: Callable[..., object], args: Any, kwargs: Any) -> None:
        leaves, spec = tree_flatten((args, kwargs), is_size)
        self.line_of_sinks = user_line()
        if not all(isinstance(leaf, PLAIN) for leaf in leaves):
            self.reasons.add("calls a sink", "with what is neither number nor text", self.line_of_sinks)
        if sink.may_raise and self.outcomes.catches():
            self.reasons.add("calls a sink", "where it may catch what that raises", self.line_of_sinks)
        self.sinks.append(sink)
        self.calls.append(tree_unflatten(leaves, spec))  # its lists and dicts as they are now
        plain_args, plain_kwargs = plain_arrays(plain_result((args, kwargs), is_size))
        with self.numbers.plain(self._set_by_sink):
            make(*plain_args, **plain_kwargs)

    def _set_by_sink(self, what: str) -> None:
        self.reasons.add("calls a sink", f"that sets {what}, where the step reads it", self.line_of_sinks)

    def _note_update(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if self.reasons:
            return
        if not begins:
            self.updates[-1].end = len(self.ops.order)
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = {id(p): self.ops.node_of(p.grad) for p in parameters if p.grad is not None}
        self.updates.append(UpdateCall(optimizer, gradients, len(self.ops.order)))

    def _batch(self) -> Any:
        """The batch, with a live number for each leaf that changes between batches, and with arrays of the step."""
        if not self.live_leaves and not holds_arrays(self.batch):
            return self.batch
        found = list(self.leaves)
        others = [place for place, leaf in enumerate(found) if not isinstance(leaf, torch.Tensor)]
        for place in [each for n, each in enumerate(others) if is_live(found[each], n, self.live_leaves)]:
            found[place] = self.tape.leaf(LiveLeaf(place), found[place])
        if holds_arrays(self.batch):
            if self.arrays.follows:
                return replace(self.batch, value=folded(self.batch.tree, iter(found), self.arrays.of_batch))
            self.reasons.add("computes with an array", line=self.line)
        return tree_unflatten(found, self.spec)

    def _trace(self, result: Any, added: list[list[Any]]) -> Trace | None:
        ops = self.ops
        self.containers.end()
        gradients, rebound, numbers = self._gradients(), self._rebound(), self._numbers()
        effects, late_numbers = self._effects(), self._late_numbers()
        found = self._result(result, added, late_numbers)
        if self.made:
            self.reasons.add("makes state", ", ".join(sorted(name for name, _ in self.made)[:3]), self.line)
        if not ops.order:
            self.reasons.add("runs no ops", line=self.line)
        if self.reasons:
            return None
        ops.finish()
        is_late = bool(late_numbers) or any(kind == "late" for kind, _ in found.leaves)
        with_grad = {e: v.grad_fn.name() if v.grad_fn else "" for e in rebound if (v := e.get()).requires_grad}
        return Trace(
            ops.graph,
            ops.sources,
            ops.notes,
            self.tape,
            found,
            gradients,
            rebound,
            with_grad,
            numbers,
            self.places,
            ops.roots,
            ops.batch.guards(ops.notes, ops.sources),
            self.appended,
            effects,
            {source: self.kinds.get(source) or TensorKind.of(source.value) for source in ops.sources.values()},
            tuple(ops.order),
            tuple(self.updates),
            tuple(self.sinks),
            LateTape(entries=self.late.entries if is_late else []),
            late_numbers,
            self.outcomes.undo,
        )

    def _gradients(self) -> dict[Gradient, fx.Node | None]:
        found: dict[Gradient, fx.Node | None] = {}
        for gradient in self.gradients:
            value = gradient.get()
            if value is not self.before.get(gradient):
                found[gradient] = None if value is None else self._node(value)
        return found

    def _rebound(self) -> dict[Any, fx.Node]:
        found: dict[Any, fx.Node] = {}
        for entry in self.places.tensors:
            value = value_now(entry)
            if value is self.before[entry]:
                continue
            if isinstance(value, torch.Tensor):
                if keeps_graph(value, getattr(entry.table, "place", None)):
                    self._refuse("returns a graph", entry.name, entry)
                found[entry] = self._node(value)
            else:
                self._refuse_set(entry, value)
        found |= {e: self._node(v) for e in self.places.plain if isinstance(v := e.get(), torch.Tensor)}
        return found | {Memory(entry): self._node(entry.get()) for entry in self.ops.given}

    def _node(self, tensor: torch.Tensor) -> Any:
        return None if self.reasons else self.ops.node_of(tensor)

    def _waits(self) -> bool:
        return bool(self.sinks) or any(True for _ in self._set_late())

    def _set_late(self) -> Iterator[tuple[Entry, Any]]:
        """The places in which the step has put numbers that are known when all ops have run."""
        found = chain(self.numbers.set_so_far(), ((entry, value_now(entry)) for entry in self.plain))
        return ((entry, value) for entry, value in found if is_a(value, (Late, StepNumber)))

    def _effects_now(self) -> dict[Any, Any]:
        if self.sinks:
            self.reasons.add("calls a sink", "before an op that may raise", self.line_of_sinks)
        for _, value in self._set_late():  # known when all ops have run; this one may raise before
            self.reasons.add("keeps a number early", line=getattr(value, "origin", self.line))
        found = {entry: TapeRef(v.entry) if isinstance(v, Live) else v for entry, v in self.numbers.set_so_far()}
        found |= {entry: value for entry, before in self.plain.items() if not same(before, value := value_now(entry))}
        found = {entry: value for entry, value in found.items() if isinstance(value, TapeRef) or is_plain(value)}
        return found | {g: node for g, node in self._gradients().items() if node is not None}

    def _numbers(self) -> dict[Entry, TapeRef]:
        found: dict[Entry, TapeRef] = {}
        for entry, value in self.numbers.set_so_far():
            if isinstance(value, Live):
                found[entry] = TapeRef(value.entry)
            elif is_number(value):
                found[entry] = self.tape.constant(value)
            elif not is_a(value, (Late, StepNumber)) or self.undoes:
                self._refuse_set(entry, value)
        return found

    def _effects(self) -> dict[Entry, Any]:
        found: dict[Entry, Any] = {}
        made: dict[int, Any] = {}
        for entry, before in self.plain.items():
            value = entry.get()
            if isinstance(value, torch.Tensor) or (is_a(value, StepNumber) and not self.undoes):
                continue
            if is_a(value, (Live, Late, StepNumber)) or not (is_plain(value) or is_empty(value)):
                self._refuse_set(entry, value)
            elif not same(before, value):
                found[entry] = as_it_stands(value, made)
        return found

    def _late_numbers(self) -> dict[Entry, TapeRef]:
        return {} if self.undoes else {e: self.arrays.late_ref(v, self.late) for e, v in self._set_late()}

    def _result(self, result: Any, added: list[list[Any]], late_numbers: Mapping[Entry, TapeRef]) -> Result:
        tree: tuple[Any, ...] = (result, [list(each) for each in added], *([list(self.calls)] if self.calls else []))
        flat, spec = tree_flatten(tree, self._is_leaf)
        if late_numbers or any(isinstance(leaf, Late) and leaf.entry is not None for leaf in flat):
            flat, spec = tree_flatten((*tree, list(self.late.inputs)), self._is_leaf)
        objects: dict[int, Any] = {}
        sources: tuple[Any, ...] = (*self.places.tensors, *self.gradients, *self.places.parameters)
        for source in sources:
            if not self.reasons and (value := source.get()) is not None:
                objects[id(value)] = source
        names: dict[int, str] = {}
        leaves: list[tuple[str, Any]] = []
        first: dict[int, int] = {}
        for position, leaf in enumerate(flat):
            if self.reasons:
                break
            is_again = isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), position) != position
            if (known := ("again", first[id(leaf)]) if is_again else self.containers.leaf(leaf)) is not None:
                leaves.append(known)
                continue
            kind, value, name = returned_leaf(self.ops, leaf, objects, step_line(self.step, returns=True), self.undoes)
            leaves.append((kind, value))
            if name is not None:
                names[position] = name
        return Result(spec, tuple(leaves), names)

    def _undo(self) -> None:
        self.outside.put_back()
        for leaf in self.ops.leaves:
            leaf.put_back()
        for gradient in self.gradients:
            gradient.set(self.before.get(gradient))
        for source, tensor in self.before.items():
            if isinstance(source, Entry) and source.get() is not tensor:
                source.set(tensor)
        for entry, value in self.kept.items():
            entry.set(value)
        self.ops.undo()
        self.known.restore()
