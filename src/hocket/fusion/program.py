"""A traced model, ready to run for all models at once: one step per op, each with its rule and what it may do instead.

Values live in a list; each is let go of after its last use, so no more activations are kept than autograd keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.errors import HocketError, InputError
from hocket.fusion.in_place import in_place
from hocket.fusion.model_slice import ModelSlice
from hocket.fusion.rules.base import where
from hocket.fusion.stacked import ModelValues, Stacked, as_type_of, is_stacked, map_tree, unwrap, with_model_dim
from hocket.fusion.steps import Step, activate_in_place, op_step, warn_without_rule
from hocket.fusion.trace import Traced
from hocket.fusion.writes import IN_PLACE, Write, find_writes

__all__ = ["FusedProgram", "Ref", "make_program"]

CANNOT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError)
SKIPPED = ("_assert", "_assert_is_none", "_assert_async", "_assert_tensor_metadata", "_assert_scalar")


class FusedProgram:
    """Runs the steps; see `make_program`."""

    def __init__(self, models: ModelSlice, steps: list[Step], size: int, traced: Traced) -> None:
        self.models = models
        self.steps = steps
        self.traced = traced
        self._size = size
        self.inputs: list[tuple[int, int]] = []
        self.tensors: list[tuple[int, str]] = []
        self.constants: list[tuple[int, Any]] = []
        self.output: Any = None
        self.owned: set[int] = set()  # places of values that become each model's own, because views are written to
        self.has_per_model = False  # values of the models that are not stacked

    def run(self, leaves: list[Any]) -> Any:
        """The output for these leaves of the arguments, `Stacked` where models have their own.

        Raises:
            InputError: an op fails; names its layer.
        """
        values: list[Any] = [None] * self._size
        for place, number in self.inputs:
            values[place] = self._owned(leaves[number]) if place in self.owned else leaves[number]
        for place, value in self.constants:
            values[place] = value
        for place, name in self.tensors:
            values[place] = self.models.tensor(name)
        for step in self.steps:
            args = _filled(step.args, values)
            kwargs = _filled(step.kwargs, values) if step.kwargs else {}
            try:
                if step.write is not None:
                    args = self._writable(step, step.write, args, kwargs, values)
                values[step.index] = self.perform(step, args, kwargs)
                if step.write is not None:
                    self._after_write(step, step.write, args, values)
                if step.must_view and not _is_view(args[0], values[step.index]):
                    raise ValueError("is written to and read by another name, and here it is a copy")
                if step.index in self.owned:
                    values[step.index] = self._owned(values[step.index])
            except (HocketError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
                shapes = ", ".join(str(unwrap(arg).dtype) for arg in args if isinstance(arg, (Stacked, Tensor)))
                raise InputError(f"{where(step.layer)}: {step.op}({shapes}): {error}") from error
            for dead in step.dead:
                values[dead] = None
        return self.traced.unflatten(_filled(self.output, values))

    def perform(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step by the first backend that can."""
        has_rule = True
        for backend in self.backends_for(step, args, kwargs):
            try:
                result = step.call(backend, args, kwargs)
            except CANNOT:
                if backend != "vmap":
                    raise
                result = NotImplemented
            if result is NotImplemented:
                has_rule = has_rule and backend != "rule"
                continue
            if not has_rule:  # not before it has run: what fails is the model's mistake
                warn_without_rule(self.models, step)
            step.used = backend if is_stacked(result) or backend == "separate" else step.used or "shared"
            if backend == "loop" and not self.has_per_model:
                self.has_per_model = bool(_per_model(result))
            return result
        raise InputError(f"{where(step.layer)}: {step.op}: nothing can compute it for all models")

    def backends_for(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """What can compute a step for these arguments: values that are not stacked leave it to the loop, mostly."""
        own = _per_model((args, kwargs)) if self.has_per_model else []
        if not own:
            return list(step.backends)
        can_rule = step.takes_numbers and not _per_model(kwargs) and all(each.are_numbers for each in own)
        return [backend for backend in step.backends if backend != "vmap" and (backend != "rule" or can_rule)]

    def _writable(
        self, step: Step, write: Write, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]
    ) -> tuple[Any, ...]:
        """The arguments of an op that writes: what it writes to is each model's own, unless all write the same."""
        target = args[0]
        if not isinstance(target, Tensor) or not (step.draws or is_stacked((args[1:], kwargs))):
            return args
        own = self._owned(target)
        for place in write.same:
            values[place] = own
        return (own, *args[1:])

    def _after_write(self, step: Step, write: Write, args: tuple[Any, ...], values: list[Any]) -> None:
        """What was written to, and all its names, are the result."""
        target, result = args[0], values[step.index]
        if result is None:  # x[i] = y
            return
        is_new = isinstance(target, Stacked) and isinstance(result, Stacked) and result.tensor is not target.tensor
        if not is_new:
            return
        if step.op.endswith("_") or step.op in IN_PLACE:
            values[step.index] = target
        else:
            for place in write.same:
                values[place] = result

    def _owned(self, value: Any) -> Any:
        """A tensor that all models share, as one of each model."""
        if not isinstance(value, Tensor):
            return value
        return Stacked(with_model_dim(value, self.models.num_models).clone())


def _is_view(source: Any, result: Any) -> bool:
    """Whether an op on stacked values gave a view, or something else than a tensor."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(source, Stacked) or not isinstance(first, Stacked):
        return True
    return bool(torch._C._is_alias_of(source.tensor, first.tensor))  # type: ignore[attr-defined]


def _per_model(tree: Any) -> list[ModelValues]:
    """What there is in a tree of arguments that each model has of its own and is not stacked."""
    found: list[ModelValues] = []
    map_tree(tree, lambda value: found.append(value) if isinstance(value, ModelValues) else None)
    return found


def _filled(tree: Any, values: list[Any]) -> Any:
    """A tree of arguments with values in place of `Ref`."""
    kind = type(tree)
    if kind is Ref:
        return values[tree.place]
    if kind is tuple:
        return tuple([_filled(each, values) for each in tree])
    if kind is list:
        return [_filled(each, values) for each in tree]
    if kind is dict:
        return {name: _filled(each, values) for name, each in tree.items()}
    if kind is slice:
        return slice(_filled(tree.start, values), _filled(tree.stop, values), _filled(tree.step, values))
    return as_type_of(tree, [_filled(each, values) for each in tree]) if isinstance(tree, tuple) else tree


class Ref:
    """The value at a place of the list of values."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def make_program(models: ModelSlice, traced: Traced) -> FusedProgram:
    """Find a rule for each op, and what may stand in for it."""
    nodes = list(traced.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    program = FusedProgram(models, [], len(nodes), traced)

    def refer(tree: Any) -> Any:
        return map_tree(
            tree, lambda value: Ref(places[value]) if isinstance(value, fx.Node) else models.of_models(value)
        )

    def layer(name: str) -> nn.Module:
        return models.layers(name)[0]

    writes, owned, views = find_writes(traced.graph, traced.tensors, traced.constants, layer)
    program.owned = {places[node] for node in owned}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    for node in nodes:
        if node.op == "output":
            program.output = refer(node.args[0])
        elif node in traced.inputs:
            program.inputs.append((places[node], traced.inputs[node]))
        elif node in traced.tensors:
            program.tensors.append((places[node], traced.tensors[node]))
        elif node in traced.constants:
            program.constants.append((places[node], models.of_models(traced.constants[node])))
        elif node.op.startswith("call_") and not _is_assertion(node):
            step = op_step(models, traced, node, places[node])
            activate = in_place(node, models.layers, lambda name: models.separate_block(name) is None)
            if activate is not None:
                activate_in_place(step, activate)
            step.args = refer(node.args)
            step.kwargs = refer(dict(node.kwargs))
            step.write = writes.get(node)
            step.must_view = node in views
            step.dead = [places[used] for used in node.all_input_nodes if last_use[used] is node]
            program.steps.append(step)
    arguments = [(step.args, step.kwargs) for step in program.steps]
    program.has_per_model = bool(_per_model((arguments, [value for _, value in program.constants])))
    return program


def _is_assertion(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in SKIPPED or name.startswith("sym_constrain"):
        return True
    return name == "eq" and bool(node.users) and all(map(_is_assertion, node.users))
