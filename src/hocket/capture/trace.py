"""One whole step (forward, loss, backward, update) as one ATen graph, by `make_fx` over the user's own step.

The step runs once, for real, on the real parameters: so it takes the kernels that eager takes. Before, every number
of the optimizer is moved a little (a rate of 0.1 is traced as 0.096875, a step count of 7 as 8); afterwards everything
is put back. Were such a number baked in, the very first comparison with an eager step would show it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten

from hocket.capture.scalars import LateFloat, Live, Tape, TapeRef, followed_math
from hocket.capture.state import PLAIN, BatchLeaf, Constant, Entry, Gradient, Inventory, ItemOf, inventory
from hocket.capture.watch import Note, OpWatch, ScalarWatch, Where
from hocket.errors import CaptureError, HocketError

__all__ = ["Result", "Trace", "trace_step"]


@dataclass(frozen=True)
class Result:
    """What the step returns: a tree whose leaves are nodes (``item``: the number inside), or plain values."""

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
        numbers: places whose number changed: the tape entry that computes it.
        batch_spec, batch_leaves: the shape of the batch; leaves that are no tensors stand as they are.
    """

    graph: fx.Graph
    sources: tuple[Any, ...]
    notes: dict[fx.Node, Note]
    tape: Tape
    result: Result
    gradients: dict[Gradient, fx.Node | None]
    rebound: dict[Entry, fx.Node]
    numbers: dict[Entry, TapeRef]
    places: Inventory
    batch_spec: TreeSpec
    batch_leaves: tuple[Any, ...]
    roots: dict[fx.Node, int]


def trace_step(step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any) -> Trace:
    """Trace `step(batch)`; model, optimizer, gradients and random state are afterwards what they were.

    The optimizer must have made its state (it does so in the first step it runs).

    Raises:
        CaptureError: the step cannot become a graph; says why and where.
    """
    places = inventory(model, optimizer)
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

    tape = Tape()
    numbers = {entry: entry.get() for entry in places.numbers}
    keys = places.state_keys()
    old_gradients = {gradient: gradient.get() for gradient in gradients}
    states = [{p: dict(s) for p, s in o.state.items() if isinstance(s, dict)} for o in places.optimizers]
    outcome: dict[str, Any] = {}
    where = Where(places.paths, places.optimizers)
    watch = OpWatch(where, tape)
    counts = _StepCounts(tape, watch, sources, tensors)

    def traced(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad(), watch, ScalarWatch(watch, tape, counts):
            for tensor in inputs:
                watch.root(tensor)
            result = step(batch)
            watch.refuse_rewound("its end")
        outcome["numbers"] = {entry: entry.get() for entry in places.numbers}
        outcome["tensors"] = {entry: entry.get() for entry in places.tensors}
        outcome["gradients"] = {gradient: gradient.get() for gradient in gradients}
        outcome["keys"] = inventory(model, optimizer).state_keys()
        flat, outcome["spec"] = tree_flatten(result)
        outcome["leaves"] = flat
        return [
            *(v.tensor if isinstance(v, LateFloat) else v for v in flat if isinstance(v, (torch.Tensor, LateFloat))),
            *(value for value in outcome["gradients"].values() if value is not None),
            *outcome["tensors"].values(),
        ]

    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), followed_math():
            _make_live(tape, numbers)
            module = make_fx(traced)(*tensors)
    except HocketError:
        raise
    except Exception as error:
        raise CaptureError(f"the step could not be traced: {type(error).__name__}: {error}") from error
    finally:
        where.close()
        for gradient, value in old_gradients.items():
            gradient.set(value)
        for entry, value in numbers.items():
            entry.set(value)
        for entry, tensor in zip(sources, tensors, strict=True):
            if isinstance(entry, Entry) and entry.get() is not tensor:
                entry.set(tensor)
        for opt, state in zip(places.optimizers, states, strict=True):
            _restore_structure(opt, state)
        watch.undo()
    if outcome["keys"] != keys:
        made = ", ".join(sorted(name for name, _ in outcome["keys"] ^ keys)[:3])
        raise CaptureError(f"the step changes which state there is ({made}); run one step before capturing")
    return _collect(module, sources, tensors, watch, tape, places, outcome, old_gradients, spec, batch_leaves)


def _restore_structure(optimizer: torch.optim.Optimizer, saved: dict[Any, dict[Any, Any]]) -> None:
    """Forget state that the traced step made; what was there before is put back value by value elsewhere."""
    for parameter, state in list(optimizer.state.items()):
        if parameter not in saved:
            del optimizer.state[parameter]
        elif isinstance(state, dict):
            for key in [key for key in state if key not in saved[parameter]]:
                del state[key]


def _make_live(tape: Tape, numbers: dict[Entry, Any]) -> None:
    for entry, value in numbers.items():
        entry.set(tape.leaf(entry, _moved(entry, value)))


def _moved(entry: Entry, value: Any) -> Any:
    if isinstance(value, float):
        return value * 0.96875
    # A whole number in the state is a count; in a group it is more likely a switch (weight_decay=0) or a size.
    return value + 1 if entry.kind == "state" else value


class _StepCounts:
    """Answers ``state["step"].item()``: the number the step began with, and what was done to it since."""

    def __init__(self, tape: Tape, watch: OpWatch, sources: list[Any], tensors: list[torch.Tensor]) -> None:
        self.tape = tape
        self.watch = watch
        self.sources = {
            watch.root(tensor): source
            for source, tensor in zip(sources, tensors, strict=True)
            if isinstance(source, Entry) and source.kind in ("state", "group") and tensor.numel() == 1
        }
        self.leaves: dict[int, Any] = {}

    def __call__(self, tensor: torch.Tensor) -> Any:
        root = self.watch.root(tensor)
        source = self.sources.get(root)
        if source is None:
            return None
        if root not in self.leaves:
            with torch.utils._python_dispatch._disable_current_modes():
                # Counted up already: what the leaf stands for in the trace is one step on (see `_moved`).
                self.leaves[root] = self.tape.leaf(ItemOf(source), tensor.item())
        value = self.leaves[root]
        for node, position in self.watch.writers.get(root, ()):
            operation = _ARITHMETIC.get(node.target)
            operand = self._operand(node, position) if operation else None
            if operation is None or operand is None:
                return None
            value = self.tape.apply(operation[tensor.dtype == torch.float32], value, operand)
        return value

    def _operand(self, node: fx.Node, position: int) -> Any:
        operand: Any = node.args[1]
        path: tuple[Any, ...] = (0, 1)
        if isinstance(operand, (list, tuple)):  # a number for each tensor
            operand, path = operand[position], (0, 1, position)
        if node.kwargs.get("alpha", 1) != 1:
            return None
        reference = self.watch.notes[node].scalars.get(path)
        if reference is not None:
            return reference
        if isinstance(operand, fx.Node):
            return self.watch.constants.get(operand)
        return operand if isinstance(operand, (int, float)) else None


def _add32(a: float, b: float) -> float:
    return float(np.float32(a) + np.float32(b))


def _mul32(a: float, b: float) -> float:
    return float(np.float32(a) * np.float32(b))


# What is done in place to a one-element tensor, in double and in single precision.
_aten = torch.ops.aten
_ARITHMETIC: dict[Any, tuple[Callable[..., float], Callable[..., float]]] = {
    _aten.add_.Tensor: (operator.add, _add32),
    _aten.mul_.Tensor: (operator.mul, _mul32),
    _aten._foreach_add_.Scalar: (operator.add, _add32),
    _aten._foreach_add_.Tensor: (operator.add, _add32),
    _aten._foreach_mul_.Scalar: (operator.mul, _mul32),
    _aten._foreach_mul_.ScalarList: (operator.mul, _mul32),
}


def _collect(
    module: fx.GraphModule,
    sources: list[Any],
    tensors: list[torch.Tensor],
    watch: OpWatch,
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
        else:
            leaves.append(("value", value))
    gradients: dict[Gradient, fx.Node | None] = {}
    for gradient, value in outcome["gradients"].items():
        node = outputs.pop(0) if value is not None else None
        if value is not old_gradients[gradient]:
            gradients[gradient] = node
    rebound: dict[Entry, fx.Node] = {}
    for entry, value in outcome["tensors"].items():
        node = outputs.pop(0)
        if value is not entry.get():
            rebound[entry] = node
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
        changed,
        places,
        spec,
        batch_leaves,
        roots,
    )
