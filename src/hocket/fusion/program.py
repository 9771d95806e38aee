"""A traced model, ready to run for all models at once: one step per op, each with its rule and what it may do instead.

The steps become a Python function (`hocket.fusion.source`), which releases each value after its last use, so that no
more activations are kept than autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.errors import HocketError, InputError
from hocket.fusion.rules.base import IN_PLACE, op_name, where
from hocket.fusion.source import ProgramSource, Ref
from hocket.fusion.stacked import ModelValues, Stacked, is_stacked, map_tree, unwrap, with_model_dim
from hocket.fusion.steps import Settings, Step, make_step, warn_without_rule
from hocket.fusion.store import Store
from hocket.fusion.traced import Traced
from hocket.fusion.writes import find_writes

CANNOT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError)


class FusedProgram:
    """The steps of a traced model, and what runs them for all models."""

    def __init__(self, store: Store, settings: Settings, traced: Traced) -> None:
        self.store = store
        self.settings = settings
        self.traced = traced
        self.steps: list[Step] = []
        self.output: Any = None
        nodes = list(traced.graph.nodes)
        places = {node: place for place, node in enumerate(nodes)}
        # places of inputs, and which leaf of the arguments each is
        self.inputs = [(places[node], number) for node, number in traced.inputs.items()]
        # places of parameters and buffers, and their names
        self.tensors = [(places[node], name) for node, name in traced.tensors.items()]
        for _, name in self.tensors:
            if name not in store.places and any(name.startswith(f"{block}.") for block in store.separate_index):
                raise ValueError(f"{name} is read outside of its block, which stays separate")
            if name not in store.places:
                raise ValueError(f"{name} is made by the forward; call each model once before they are fused")
        # places of constants, and these
        self.constants = [(places[node], value) for node, value in traced.constants.items()]

        def refer(tree: Any) -> Any:
            return map_tree(tree, lambda value: Ref(places[value]) if isinstance(value, fx.Node) else value)

        def block(name: str) -> nn.Module:
            return store.group(store.separate_index[name])[0]

        writes, owned, views, written = find_writes(traced.graph, traced.tensors, traced.constants, block)
        # places of values that become each model's own, because views of them are written to
        self.owned = {places[node] for node in owned}
        # parameters and buffers that ops write into
        self.written_names = [root for kind, root in written if kind == "tensor"]
        # whether parameters are among them
        self.writes_parameters = any(isinstance(store.whole(name), nn.Parameter) for name in self.written_names)
        # whether ops write into the arguments
        self.writes_inputs = any(kind == "value" and root in traced.inputs for kind, root in written)
        last_use = {used: node for node in nodes for used in node.all_input_nodes}
        for node in nodes:
            if node.op == "output":
                self.output = refer(node.args[0])
            elif node.op.startswith("call_"):
                step = make_step(store, settings, traced, node, places[node])
                step.args, step.kwargs = refer(node.args), refer(dict(node.kwargs))
                step.write, step.must_view = writes.get(node), node in views
                step.dead = [places[used] for used in node.all_input_nodes if last_use[used] is node]
                self.steps.append(step)
        # whether ops may find that values are not as they were when the models were recorded
        self.has_checks = any(step.op in ("_assert", "_assert_async") for step in self.steps)
        self._check_order(nodes, writes)
        arguments = [(step.args, step.kwargs) for step in self.steps]
        self.has_per_model = bool(_per_model((arguments, [value for _, value in self.constants])))

    def _check_order(self, nodes: list[fx.Node], writes: Any) -> None:
        """Refuse writes into parameters that an op has read: all models' gradients may need them as they were."""
        names = [name for name in self.written_names if isinstance(self.store.whole(name), nn.Parameter)]
        begun: set[str] = set()
        for node in nodes:
            if node in writes and begun.intersection(names):
                raise ValueError(
                    f"{node.name}: writes into {sorted(begun.intersection(names))[0]} after an op has read it"
                )
            if node.op.startswith("call_") and op_name(node.target) not in ("detach", "getattr"):
                begun.update(self.traced.tensors[used] for used in node.all_input_nodes if used in self.traced.tensors)

    def run(self, leaves: list[Any]) -> Any:
        """The output for these leaves, `Stacked` where models have their own. An error names the layer."""
        return self.traced.unflatten(self._function(leaves, self.store.tensor))

    @cached_property
    def _function(self) -> Callable[..., Any]:
        source = ProgramSource(self)
        for step in self.steps:
            is_seen = step.must_view or step.index in self.owned
            call = self._write if step.write is not None else self._seen if is_seen else self._perform
            source.add(step, partial(call, step), step.write)
        return source.function()

    def _perform(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        """One step by the first backend that can."""
        try:
            return self._by_backend(step, args, kwargs)
        except (HocketError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            types = ", ".join(str(unwrap(arg).dtype) for arg in args if isinstance(arg, (Stacked, Tensor)))
            raise InputError(f"{where(step.layer)}: {step.op}({types}): {error}") from error

    def _by_backend(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                warn_without_rule(self.settings, step.layer, step.op)
            step.used = backend if is_stacked(result) or backend == "separate" else step.used or "shared"
            if backend == "loop" and not self.has_per_model:
                self.has_per_model = bool(_per_model(result))
            return result
        raise InputError(f"{where(step.layer)}: {step.op}: nothing can compute it for all models")

    def backends_for(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The backends that can compute a step for these arguments: mostly the loop if values are not stacked."""
        own = _per_model((args, kwargs)) if self.has_per_model else []
        if not own:
            return step.backends
        if step.draws:  # with a rate for each model
            can_rule = step.takes_numbers and {type(value) for each in own for value in each.values} <= {int, float}
        else:
            can_rule = step.takes_numbers and not _per_model(kwargs) and all(each.are_numbers for each in own)
        return [backend for backend in step.backends if backend != "vmap" and (backend != "rule" or can_rule)]

    def _seen(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        """A step whose result is written to, or whose argument."""
        result = self._perform(step, *args, **kwargs)
        if step.must_view and not _is_view(args[0], result):
            raise InputError(
                f"{where(step.layer)}: {step.op}: is written to and read by another name, and here it is a copy"
            )
        return self.own(result) if step.index in self.owned else result

    def _write(self, step: Step, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run a step that writes over its first argument. Returns the new value of that argument, and the result."""
        target = args[0]
        if isinstance(target, Tensor) and (step.draws or is_stacked((args[1:], kwargs))):
            target = self.own(target)
        result = self._perform(step, target, *args[1:], **kwargs)
        is_new = isinstance(target, Stacked) and isinstance(result, Stacked) and result.tensor is not target.tensor
        if not is_new or result is None:  # x[i] = y
            return target, result
        return (target, target) if step.op.endswith("_") or step.op in IN_PLACE else (result, result)

    def own(self, value: Any) -> Any:
        """A tensor that all models share, as one of each model."""
        if not isinstance(value, Tensor):
            return value
        return Stacked(with_model_dim(value, self.store.num_models).clone())


def _is_view(source: Any, result: Any) -> bool:
    """True if an op on stacked values gave a view, or something else than a tensor."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(source, Stacked) or not isinstance(first, Stacked):
        return True
    return bool(torch._C._is_alias_of(source.tensor, first.tensor))  # type: ignore[attr-defined]


def _per_model(tree: Any) -> list[ModelValues]:
    found: list[ModelValues] = []
    map_tree(tree, lambda value: found.append(value) if isinstance(value, ModelValues) else None)
    return found
