"""One whole step (forward, loss, backward, update) as one ATen graph, by `make_fx` over the user's own step.

The step runs once, for real, on the real parameters: so it takes the kernels that eager takes. Before, every number
of the optimizer is moved a little (a rate of 0.1 is traced as 0.096875, a step count of 7 as 8); afterwards everything
is put back. Were such a number baked in, the very first comparison with an eager step would show it. Where a step
branches on a number and the moved one leads to another branch, the step is traced again with that number as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hocket.errors import CaptureError, HocketError
from hocket.tracing.purity.appended import AppendedList, standing_in
from hocket.tracing.purity.places import Place
from hocket.tracing.recording.batch_reads import BatchGuards, BatchNumber
from hocket.tracing.recording.function_recorder import FunctionRecorder, python_functions_open
from hocket.tracing.recording.module_tracker import ModuleTracker
from hocket.tracing.recording.recorder import Note, OpRecorder
from hocket.tracing.recording.step_counts import StepCounts
from hocket.tracing.refusals import exits_refused, remembered_refusals
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.live import LateFloat, Live
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.state import PLAIN, BatchLeaf, Constant, Entry, Gradient, Inventory, LiveLeaf, inventory

__all__ = ["Result", "Trace", "trace_step"]


@dataclass(frozen=True)
class Result:
    """What the step returns, and what it appends to each list: a tree of two.

    Its leaves are nodes (``item``: the number inside), numbers of the tape, or plain values.
    """

    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        graph: placeholders, one for each of `sources`; ATen ops; one output.
        notes: what was seen of each op.
        gradients: each parameter's gradient at the end: a node, None, or absent where it stays what it was.
        rebound: places that hold another tensor at the end than at the beginning.
        with_grad: those of them whose tensor requires a gradient.
        numbers: places whose number changed: the tape entry that computes it.
        batch_spec, batch_leaves: the shape of the batch; leaves that are no tensors stand as they are.
        batch_guards: what the step reads of its batch.
        appended: the lists that it appends to.
    """

    graph: fx.Graph
    sources: tuple[Any, ...]
    notes: dict[fx.Node, Note]
    tape: Tape
    result: Result
    gradients: dict[Gradient, fx.Node | None]
    rebound: dict[Entry, fx.Node]
    with_grad: frozenset[Entry]
    numbers: dict[Entry, TapeRef]
    places: Inventory
    batch_spec: TreeSpec
    batch_leaves: tuple[Any, ...]
    roots: dict[fx.Node, int]
    batch_guards: BatchGuards
    appended: tuple[AppendedList, ...] = ()


def trace_step(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    further: Sequence[Place] = (),
    appended: Sequence[AppendedList] = (),
    live_leaves: Collection[int] = (),
) -> Trace:
    """Trace `step(batch)`; model, optimizer, gradients and random state are afterwards what they were.

    The optimizer must have made its state (it does so in the first step it runs). `further` places hold tensors that
    the step binds anew, or numbers that change between steps; `appended` lists are those it appends to; `live_leaves`
    are leaves of the batch (counted among those that are no tensors) whose number changes with each batch.

    Raises:
        CaptureError: the step cannot become a graph; says why and where.
    """
    places = inventory(model, optimizer, further)
    unmoved: set[Any] = set()
    while True:
        tape = Tape()
        failure: HocketError | None = None
        try:
            trace = _traced(step, model, optimizer, batch, places, tape, unmoved, appended, live_leaves)
        except HocketError as error:
            failure = error
        finally:
            tape.close()
        # A guard that fails for the numbers as they are: the moved ones led the step along another branch.
        astray = tape.upset()
        if not astray:
            if failure is not None:
                raise failure
            return trace
        unmoved.update(astray)


def _traced(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    places: Inventory,
    tape: Tape,
    unmoved: set[Any],
    appended: Sequence[AppendedList],
    live_leaves: Collection[int],
) -> Trace:
    leaves, spec = tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *PLAIN)):
            raise CaptureError(
                f"the batch holds a {type(leaf).__module__}.{type(leaf).__name__}, whose tensors cannot be seen; "
                "pass tensors and plain values, in lists, tuples and dicts"
            )
    batch_leaves = tuple(BatchLeaf(i) if isinstance(v, torch.Tensor) else v for i, v in enumerate(leaves))
    gradients = [Gradient(entry) for entry in places.parameters]
    sources: list[Any] = [*places.parameters, *places.tensors]
    sources += [gradient for gradient in gradients if gradient.get() is not None]
    tensors = [source.get() for source in sources]
    sources += [leaf for leaf in batch_leaves if isinstance(leaf, BatchLeaf)]
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    numbers = {entry: entry.get() for entry in places.numbers}
    keys = places.state_keys()
    old_gradients = {gradient: gradient.get() for gradient in gradients}
    states = [{p: dict(s) for p, s in o.state.items() if isinstance(s, dict)} for o in places.optimizers]
    outcome: dict[str, Any] = {}
    where = ModuleTracker(places.paths, places.optimizers)

    def stand_in(source: Any, value: Any) -> Any:
        return value if source in unmoved else _moved(source, value)

    def traced(*inputs: torch.Tensor) -> list[torch.Tensor]:
        for source, tensor in zip(sources, inputs, strict=True):
            root = watch.root(tensor)
            if isinstance(source, BatchLeaf):
                watch.batch.add_leaf(tensor, source.index)
            else:
                watch.batch.lose([root])
        counts = StepCounts(tape, watch, sources, tensors)
        with torch.enable_grad(), watch, FunctionRecorder(watch, tape, counts, stand_in):
            with standing_in(appended) as added:
                result = step(tree_unflatten(_with_live_leaves(leaves, live_leaves, tape, stand_in), spec))
            watch.refuse_rewound("its end")
            refusals.check()
        outcome["numbers"] = {entry: entry.get() for entry in places.numbers}
        outcome["tensors"] = {entry: entry.get() for entry in places.tensors}
        outcome["gradients"] = {gradient: gradient.get() for gradient in gradients}
        outcome["keys"] = places.again().state_keys()
        flat, outcome["spec"] = tree_flatten((result, added))
        outcome["leaves"] = flat
        return [
            *(v.tensor if isinstance(v, LateFloat) else v for v in flat if isinstance(v, (torch.Tensor, LateFloat))),
            *(value for value in outcome["gradients"].values() if value is not None),
            *outcome["tensors"].values(),
        ]

    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    with remembered_refusals() as refusals:
        watch = OpRecorder(where, tape, refusals)
        try:
            with torch.random.fork_rng(devices), followed_math(), exits_refused(), python_functions_open():
                for entry, value in numbers.items():
                    entry.set(tape.leaf(entry, stand_in(entry, value), value))
                # Without a mode in a context, make_fx makes a new one for each tensor, with a stack trace: a fifth of
                # what a capture takes.
                with tracing(TracingContext(FakeTensorMode())):
                    module = make_fx(traced)(*tensors)
        except HocketError:
            refusals.check()
            raise
        except Exception as error:
            refusals.check()
            raise CaptureError(f"the step could not be traced: {type(error).__name__}: {error}") from error
        finally:
            where.close()
            _put_back(places, sources, tensors, numbers, old_gradients, states)
            watch.undo()
    if outcome["keys"] != keys:
        made = ", ".join(sorted(name for name, _ in outcome["keys"] ^ keys)[:3])
        raise CaptureError(f"the step changes which state there is ({made}); run one step before capturing")
    found = _collect(module, sources, tensors, watch, tape, places, outcome, old_gradients, spec, batch_leaves)
    return replace(found, appended=tuple(appended))


def _put_back(
    places: Inventory,
    sources: list[Any],
    tensors: list[torch.Tensor],
    numbers: dict[Entry, Any],
    gradients: dict[Gradient, Any],
    states: list[dict[Any, dict[Any, Any]]],
) -> None:
    """Put what the traced step exchanged back into its places."""
    for gradient, value in gradients.items():
        gradient.set(value)
    for entry, number in numbers.items():
        entry.set(number)
    for source, tensor in zip(sources, tensors, strict=True):
        if isinstance(source, Entry) and source.get() is not tensor:
            source.set(tensor)
    for optimizer, state in zip(places.optimizers, states, strict=True):
        _restore_structure(optimizer, state)


def _restore_structure(optimizer: torch.optim.Optimizer, saved: dict[Any, dict[Any, Any]]) -> None:
    """Forget state that the traced step made; what was there before is put back value by value elsewhere."""
    for parameter, state in list(optimizer.state.items()):
        if parameter not in saved:
            del optimizer.state[parameter]
        elif isinstance(state, dict):
            for key in [key for key in state if key not in saved[parameter]]:
                del state[key]


def _with_live_leaves(
    leaves: list[Any], live: Collection[int], tape: Tape, stand_in: Callable[[Any, Any], Any]
) -> list[Any]:
    """The leaves of the batch, with a live number for each that changes between batches."""
    found, count = list(leaves), -1
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            continue
        count += 1
        if count in live:
            source = LiveLeaf(place)
            found[place] = tape.leaf(source, stand_in(source, leaf), leaf)
    return found


def _moved(source: Entry | BatchNumber | LiveLeaf, value: Any) -> Any:
    if isinstance(value, float):
        return value * 0.96875
    # A whole number in the state is a count; in a group it is more likely a switch (weight_decay=0) or a size.
    if isinstance(source, Entry):
        return value + 1 if source.kind in ("state", "object") else value
    return value + 1 if isinstance(source, LiveLeaf) else value


def _collect(
    module: fx.GraphModule,
    sources: list[Any],
    tensors: list[torch.Tensor],
    watch: OpRecorder,
    tape: Tape,
    places: Inventory,
    outcome: dict[str, Any],
    old_gradients: dict[Gradient, Any],
    spec: TreeSpec,
    batch_leaves: tuple[Any, ...],
) -> Trace:
    graph = module.graph
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    leaves: list[tuple[str, Any]] = []
    for value in outcome["leaves"]:
        if isinstance(value, LateFloat):
            leaves.append(("item", outputs.pop(0)))
        elif isinstance(value, torch.Tensor):
            leaves.append(("tensor", outputs.pop(0)))
        elif isinstance(value, Live):
            leaves.append(("number", TapeRef(value.index)))
        elif isinstance(value, PLAIN):
            leaves.append(("value", value))
        else:
            raise CaptureError(
                f"the step returns (or keeps in a list) a {type(value).__module__}.{type(value).__name__}, whose "
                "tensors cannot be seen; return tensors and plain values, in lists, tuples and dicts"
            )
    gradients: dict[Gradient, fx.Node | None] = {}
    for gradient, value in outcome["gradients"].items():
        node = outputs.pop(0) if value is not None else None
        if value is not old_gradients[gradient]:
            gradients[gradient] = node
    rebound: dict[Entry, fx.Node] = {}
    with_grad: set[Entry] = set()
    for entry, value in outcome["tensors"].items():
        node = outputs.pop(0)
        if value is not entry.get():
            rebound[entry] = node
            if value.requires_grad:
                with_grad.add(entry)
    changed: dict[Entry, TapeRef] = {}
    for entry, value in outcome["numbers"].items():
        moved_only = isinstance(value, Live) and tape.entries[value.index][0] is None
        if moved_only:
            continue
        if entry.kind == "group":
            raise CaptureError(
                f"the step changes the optimizer's {entry.name} while it runs; call the scheduler's step() after the "
                "training step, not inside it"
            )
        if entry.kind == "object":
            raise CaptureError(f"the step changes {entry.name}; count outside the step, or return the number")
        if not isinstance(value, Live):
            raise CaptureError(f"the step sets {entry.name} to {value!r}, which does not follow from its old value")
        changed[entry] = TapeRef(value.index)
    all_sources = list(sources)
    roots: dict[fx.Node, int] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, tensors, strict=True):
        roots[node] = watch.root(tensor)
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            roots[node] = watch.root(value)
            all_sources.append(Constant(node.target, value))
    return Trace(
        graph,
        tuple(all_sources),
        watch.notes,
        tape,
        Result(outcome["spec"], tuple(leaves)),
        gradients,
        rebound,
        frozenset(with_grad),
        changed,
        places,
        spec,
        batch_leaves,
        roots,
        watch.batch.guards(),
    )
