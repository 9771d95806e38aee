"""A captured step, recorded again in another form: images with their channels last, updates by fused kernels.

The recorded ops run once more, on copies of everything, with these changes:

- ``channels-last``: what goes into a convolution of images has its channels last in memory, and so has its result. A
  view that needs channels first is one of a copy. Gradients and whatever else the step leaves behind keep their layout.
  A dropout draws its random numbers in the order in which they lie in memory, so masks have channels first.
- ``fused-update``: the ops of an optimizer's `step` are left out, and a twin of the optimizer makes the update on the
  copies by torch's own fused kernels.

The user's step is not called.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from hocket.errors import CaptureError
from hocket.tracing.captured import Captured, alone, captured_from
from hocket.tracing.recording.function_recorder import FunctionRecorder, python_functions_open
from hocket.tracing.recording.module_tracker import ModuleTracker
from hocket.tracing.recording.op_arguments import Note, filled_arguments
from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.recording.trace import Trace, UpdateCall
from hocket.tracing.saved_state import copies_of, generators_kept
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.live import wrap
from hocket.tracing.sources import BatchLeaf, Entry
from hocket.tracing.standing import TensorKind, value_now

CHANNELS_LAST, FUSED_UPDATE = "channels-last", "fused-update"

# The optimizers with fused kernels for CPU, the state of which is as without them. SGD's is wrong for bfloat16 in torch
# 2.13 (with momentum, parameters of 1e28 after five steps), so only these dtypes have them.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)

_aten = torch.ops.aten
CONVOLUTIONS = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}  # positions of images
FILTERS = {_aten.convolution.default: 1, _aten.convolution_backward.default: 2}  # position of the argument
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default)


def has_images(captured: Captured) -> bool:
    """True if a convolution of the step reads images, so that their layout matters."""
    found = (node for node in captured.trace.graph.nodes if node.target in CONVOLUTIONS)
    return any(node.args[0].meta["val"].dim() == 4 for node in found)


def rerecorded(captured: Captured, rewrites: Collection[str]) -> Captured:
    """The captured step in another form, or a `CaptureError` if an op cannot be run in it."""
    devices = sorted({kind.device.index for kind in captured.trace.kinds.values() if kind and kind.device.index})
    kept = generators_kept(captured.trace.places.generators)
    with alone(), torch.random.fork_rng(devices), kept, torch.no_grad():
        again = _Again(captured, frozenset(rewrites))
        try:
            trace = again.run()
        except CaptureError:
            raise
        except Exception as error:  # whatever an op says that does not know this form
            raise CaptureError(f"it could not be recorded in this form: {type(error).__name__}: {error}") from error
    return replace(captured_from(trace, captured.signature, captured.step, captured.batch), example=captured.example)


class _Where(ModuleTracker):
    """Says of each op that runs what was seen of the op that it stands for."""

    def __init__(self) -> None:
        super().__init__({}, ())
        self.note = Note("forward", "")

    def here(self) -> tuple[str, str]:
        return self.note.phase, self.note.layer

    def ran(self, layer: str) -> None:
        """No-op: the layers of backward ops are known."""


class _Again:
    """One run of a trace: the values of its nodes, and what was recorded anew."""

    def __init__(self, captured: Captured, rewrites: frozenset[str]) -> None:
        self.captured, self.trace = captured, captured.trace
        self.last = CHANNELS_LAST in rewrites
        self.where = _Where()
        self.tape = captured.trace.tape.reopened()
        self.ops = OpRecorder(self.where, self.tape, generators=captured.trace.places.generators)
        self.values: dict[fx.Node, Any] = {}
        numbers = self.trace.tape.evaluate(self.trace.tape.found)
        if numbers is None:
            raise CaptureError("its numbers cannot be computed again")
        self.numbers = numbers
        self.updates = {
            update.first: update
            for update in self.trace.updates
            if FUSED_UPDATE in rewrites
            and update.end > update.first
            and has_fused_kernels(update.optimizer)
            and not runs_hooks(update.optimizer)  # which fused kernels would leave out
        }
        self.drawn = {root for note in self.trace.notes.values() if note.random for root in note.writes}
        gradients = (gradient for update in self.trace.updates for gradient in update.gradients.values())
        self.left = {*self.trace.left_behind, *gradients}  # whose layout stays
        self.converted: dict[fx.Node, tuple[int, torch.Tensor]] = {}

    def run(self) -> Trace:
        self._copy_sources()
        place, end = 0, -1
        with self.ops:
            for node in self.trace.graph.nodes:
                if node.op != "call_function":
                    continue
                if node.target is operator.getitem:
                    if node.args[0] in self.values:
                        self._take(node)
                    continue
                if place in self.updates:
                    end = self.updates[place].end
                    self._update(self.updates[place])
                if place < end:
                    self._skip(node)
                else:
                    self._call(node)
                place += 1
        if self.tape.reasons:
            raise CaptureError(str(self.tape.reasons.first))
        return self._trace()

    # ------------------------------------------------------------------------------------------------------ values

    def _copy_sources(self) -> None:
        """Copies of all that the step reads, which share memory as the originals do."""
        batch = tree_flatten(self.captured.batch)[0]
        found = []
        for source in self.trace.sources.values():
            kind = self.trace.kinds[source]
            assert kind is not None, "other layouts are not recorded"
            now = batch[source.index] if isinstance(source, BatchLeaf) else value_now(source)
            if TensorKind.of(now) is None or now.shape != kind.shape or now.stride() != kind.stride:
                now = torch.zeros(()).to(kind.dtype).new_zeros(kind.shape).as_strided(kind.shape, kind.stride)
            found.append(now)
        for (node, source), copy in zip(self.trace.sources.items(), copies_of(found), strict=True):
            self.values[node] = copy
            self.ops.add_source(source, copy)
        if self.last:
            calls = [node for node in self.trace.graph.nodes if node.target in FILTERS]
            filters = {node.args[FILTERS[node.target]] for node in calls}  # a region's are part of its batch
            with self.ops:
                for node, source in self.trace.sources.items():
                    if isinstance(source, BatchLeaf) and node not in filters:
                        self.values[node] = _with_channels_last(self.values[node])

    def _call(self, node: fx.Node) -> None:
        note, func = self.trace.notes[node], node.target
        args, kwargs = filled_arguments(node, note, self._value, lambda number: self.numbers[number.index])
        self.where.note = note
        if self.last:
            args, kwargs = self._changed(node, args, kwargs)
        with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(note.grad_mode):
            result = func(*args, **kwargs)  # type: ignore[operator]
        made = self.ops.notes[self.ops.order[-1]]
        made.scalars.update(note.scalars)
        made.grad_mode = note.grad_mode
        made.effects_before = {
            place: self.ops.node_of(self._value(value)) if isinstance(value, fx.Node) else value
            for place, value in note.effects_before.items()
        }
        made.is_undone = note.is_undone
        self.values[node] = self._kept(node, result) if isinstance(result, torch.Tensor) else result

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:
            raise CaptureError("an op reads what only an update computes")
        return self.values[node]

    def _take(self, node: fx.Node) -> None:
        value = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        self.where.note = self.trace.notes[node.args[0]]  # type: ignore[index]
        self.values[node] = self._kept(node, value)

    def _kept(self, node: fx.Node, value: Any) -> Any:
        """A value in the layout that the step leaves it in, if it leaves it behind."""
        expected = node.meta["val"]
        if node not in self.left or not isinstance(value, torch.Tensor) or value.stride() == expected.stride():
            return value
        copy = torch.empty_strided(expected.shape, expected.stride(), dtype=value.dtype, device=value.device)
        return copy.copy_(value)

    # ----------------------------------------------------------------------------------------------- channels last

    def _changed(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        func: Any = node.target
        args = list(args)
        for position in CONVOLUTIONS.get(func, ()):
            args[position] = self._image(node.args[position], args[position])
        if func in _VIEWS and not _can_view(args[0], args[1]):
            args[0] = args[0].contiguous()
        roots = self.trace.notes[node].returns
        if self.trace.notes[node].random or not self.drawn.isdisjoint(root for root in roots if root is not None):
            schema = func._schema.arguments
            if any(argument.name == "memory_format" for argument in schema) and _is_image(args[0]):
                kwargs = {**kwargs, "memory_format": torch.contiguous_format}
        return tuple(args), kwargs

    def _image(self, node: Any, value: Any) -> Any:
        if not _is_image(value):
            return value
        version, converted = self.converted.get(node, (-1, value))
        if version != value._version:
            converted = _with_channels_last(value)
            self.converted[node] = (value._version, converted)
        return converted

    # ------------------------------------------------------------------------------------------------ fused updates

    def _update(self, call: UpdateCall) -> None:
        """The update as fused kernels make it, on the copies."""
        sources = {id(source.get()): node for node, source in self._entries("parameter")}
        twin = object.__new__(type(call.optimizer))
        vars(twin).update(vars(call.optimizer))
        vars(twin).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
        states = {(id(s.table), s.key): node for node, s in self._entries("state")}
        known = {(id(e.table), e.key): e for e in self.trace.places.numbers}
        tables = {id(e.table.parameter): e.table for e in self.trace.places.tensors if e.kind == "state"}
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for number, group in enumerate(call.optimizer.param_groups):
            made = {**group, "params": [], "fused": True}
            for entry in self.trace.places.numbers:
                if entry.kind == "group" and entry.table.optimizer is call.optimizer and entry.table.position == number:
                    made[entry.key] = self._live(entry, made[entry.key])
            for parameter in group["params"]:
                copy = self.values[sources[id(parameter)]]
                gradient = call.gradients.get(id(parameter))
                copy.grad = None if gradient is None else self.values[gradient]
                made["params"].append(copy)
                for key in call.optimizer.state.get(parameter, {}):
                    place = (id(tables[id(parameter)]), key)
                    if place in known or place not in states:
                        raise CaptureError("the optimizer keeps what its fused kernels do not know")
                    twin.state[copy][key] = self.values[states[place]]
            twin.param_groups.append(made)
        self.where.note = Note("update", "")
        with followed_math(), python_functions_open(), FunctionRecorder(self.ops, self.tape, lambda tensor: None):
            type(twin).step(twin)
        for group in twin.param_groups:
            for copy in group["params"]:
                copy.grad = None

    def _entries(self, kind: str) -> list[tuple[fx.Node, Entry]]:
        pairs = self.trace.sources.items()
        return [(node, source) for node, source in pairs if isinstance(source, Entry) and source.kind == kind]

    def _live(self, entry: Entry, value: Any) -> Any:
        index = self.tape.entries.index((None, self.tape.leaves.index(entry)))
        live = wrap(self.tape, index, entry.get() if entry.path else value)
        if not entry.path:
            return live
        elements = list(value)
        elements[entry.path[0]] = live
        return type(value)(elements)

    def _skip(self, node: fx.Node) -> None:
        """An op of an update that was made otherwise: what it returned stands where the step keeps it."""
        returns = self.trace.notes[node].returns
        for source in self.trace.graph.nodes:
            if source.op == "call_function":
                break
            value, expected = self.values[source], node.meta["val"]
            if len(returns) == 1 and self.trace.roots[source] == returns[0] and value.shape == expected.shape:
                self.values[node] = value
                return

    # ---------------------------------------------------------------------------------------------------- the trace

    def _trace(self) -> Trace:
        self.tape.close()
        self.tape.unproven = self.trace.tape.unproven  # what is proven of the plain form holds for this one
        self.ops.finish()
        return self.trace.moved_to(
            self._node,
            graph=self.ops.graph,
            sources=self.ops.sources,
            notes=self.ops.notes,
            tape=self.tape,
            roots=self.ops.roots,
            kinds={s: self.trace.kinds.get(s) or TensorKind.of(s.value) for s in self.ops.sources.values()},
            order=tuple(self.ops.order),
        )

    def _node(self, node: fx.Node) -> fx.Node:
        if node not in self.values:
            raise CaptureError("the step leaves behind what only its own update computes")
        return self.ops.node_of(self.values[node])


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


def _with_channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last) if _is_image(value) else value


def _can_view(tensor: torch.Tensor, shape: Any) -> bool:
    with _disable_current_modes():
        try:
            tensor.view(tuple(shape))
        except RuntimeError:
            return False
        return True


def has_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """True if torch has kernels for the whole update of this optimizer, which it does not use yet."""
    if type(optimizer) not in _FUSED:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is not None or any(group.get(o) for o in ("foreach", "differentiable", "capturable")):
            return False
        if any(p.dtype not in _FUSED_DTYPES or p.device.type != "cpu" for p in group["params"]):
            return False
    return True


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if a hook, of this optimizer or of all, runs at the beginning or the end of an update."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks))
