"""A traced model, ready to run for all models at once: one step per op, each with what computes it.

rule      the op's own, on stacked tensors
vmap      torch's, where there is no rule
loop      the op on one model after another
separate  the models' own blocks, where these did not fuse

The steps become a Python function (`hocket.fusion.source`), which releases each value after its last use, so that no
more activations are kept than autograd keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.errors import HocketError, InputError
from hocket.fusion import fallback
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.known_functions import STRIDED, is_write
from hocket.fusion.rules import OpContext, find
from hocket.fusion.rules.base import IN_PLACE, op_name, where
from hocket.fusion.rules.pointwise import NUMBERS
from hocket.fusion.rules.random import DRAWS, WITH_RATES, drawing, each
from hocket.fusion.source import ProgramLayout, ProgramSource, Ref, Step
from hocket.fusion.stacked import ModelValues, Stacked, is_stacked, laid_out, map_tree, unwrap, with_model_dim
from hocket.fusion.store import Store
from hocket.fusion.traced import Traced
from hocket.fusion.writes import find_writes, in_place
from hocket.pystate.origins import level_of_user

CANNOT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError)
# In torch 2.13, padding rows and other elements get a gradient there, axes are mistaken, what is saved is written, and
# running statistics that are not contiguous are not.
WITHOUT_VMAP = ("embedding", "unfold", "select_scatter", "cumprod_", "float_power_", "index_reduce_", "batch_norm")
BACKENDS = {"vmap": ["vmap", "rule", "loop"], "loop": ["loop"]}


@dataclass(frozen=True)
class Settings:
    """The user's settings of an array."""

    backend: str  # "auto", "rule", "vmap" or "loop"
    strict: bool  # whether an op without a rule is an error
    model_axis: ModelAxis  # what is settled about its arguments
    # ops without a rule, and their layers, that a warning has named
    warned: set[tuple[str, str]] = field(default_factory=set)


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
        source = ProgramSource(self.layout)
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

    @property
    def layout(self) -> ProgramLayout:
        """The places of the program's values."""
        return ProgramLayout(self.inputs, self.tensors, self.constants, self.owned, self.own, self.output)

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


def make_step(store: Store, settings: Settings, traced: Traced, node: fx.Node, place: int) -> Step:
    """The step of one op or separate block, and what may stand in for its rule."""
    layer = traced.layer(node)
    orders = node.meta.get("orders", ()) if store.seeds is not None else ()
    if node.op == "call_module":  # a block of which each model has its own
        blocks = store.group(store.separate_index[layer])
        context = OpContext(layer, type(blocks[0]).__name__, tuple(blocks), orders=orders, memory=store.memory)
        call = _caller(store, context, None, True)
        return Step(place, layer, context.name, call, ["separate"], alone=_drawing(store, blocks))
    target: Any = node.target
    known, rule = op_name(target), find(target)
    name: str = known or getattr(target, "__name__", None) or str(target)
    plain = target = getattr(Tensor, target) if node.op == "call_method" else target
    if (activate := in_place(node)) is not None:
        plain, rule = activate, lambda context, input, *options, **named: Stacked(activate(input.tensor))
    context = OpContext(layer, name, (target,) * store.num_models, orders=orders, memory=store.memory)
    draws = name in DRAWS or known is None
    backends = BACKENDS.get(settings.backend, ["rule", "vmap", "loop"])
    if name in STRIDED:
        backends = ["rule"]  # a model's part of a stacked tensor lies elsewhere in memory than alone
    elif name in WITHOUT_VMAP or (draws and store.seeds is not None):  # there all draw from torch's own generator
        backends = [backend for backend in backends if backend != "vmap"]
    alone = [plain] * store.num_models
    return Step(
        place,
        layer,
        name,
        _caller(store, context, rule, draws),
        backends,
        alone=_drawing(store, alone) if draws else alone,
        takes_numbers=name in NUMBERS or name in WITH_RATES,
        draws=draws,
        orders=() if is_write(name) else orders,
    )


def _drawing(store: Store, functions: Sequence[Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
    """Each model's function, which draws from the model's own generator where there are seeds."""

    def seeded(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: drawing(function, _generators(store, args)[index])(*args, **kwargs)

    return functions if store.seeds is None else [seeded(*each) for each in enumerate(functions)]


def _caller(
    store: Store, context: OpContext, rule: Callable[..., Any] | None, draws: bool
) -> Callable[[str, tuple[Any, ...], dict[str, Any]], Any]:
    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws and not is_stacked(args) and not (kwargs and is_stacked(kwargs)):
            return context.target(*args, **kwargs)
        here = context
        if draws and store.seeds is not None:
            here = replace(here, generators=_generators(store, args))
            if not is_write(context.name):
                args, kwargs = laid_out((args, kwargs), context.orders)
        if backend == "rule":
            return NotImplemented if rule is None else rule(here, *args, **kwargs)
        if backend == "vmap":
            return fallback.vmap(context.target, args, kwargs, store.num_models)
        return each(here, *args, **kwargs)

    return call


def _generators(store: Store, args: tuple[Any, ...]) -> tuple[torch.Generator, ...]:
    first = next((unwrap(arg) for arg in args if isinstance(arg, (Stacked, Tensor))), None)
    return store.generators_on(torch.device("cpu") if first is None else first.device)


def warn_without_rule(settings: Settings, layer: str, op: str, reason: str = "") -> None:
    """Warn once of an op without a rule, or raise an InputError if the module is strict."""
    if (op, layer) in settings.warned:
        return
    settings.warned.add((op, layer))
    if settings.strict:
        because = reason or "no rule fuses it as it is called here"
        raise InputError(f"{where(layer)}: {op}: {because} (strict=True)")
    if reason:
        warnings.warn(f"hocket.fuse: {op}: {reason}; its models run one after another", stacklevel=level_of_user())
    else:
        warnings.warn(
            f"hocket.fuse: {where(layer)}: {op} has no rule; it runs by vmap or a loop", stacklevel=level_of_user()
        )
