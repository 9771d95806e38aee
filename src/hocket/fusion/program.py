"""A traced model, ready to run for all models at once: one step per op, each with its rule and what it may do instead.

Values live in a list; each is let go of after its last use, so no more activations are kept than autograd keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from hocket.errors import HocketError, InputError
from hocket.fusion import fallback
from hocket.fusion.chains import Chain, find_chain, plain_lookup
from hocket.fusion.in_place import in_place
from hocket.fusion.rules import Site, conv, find, find_module, norm, reduction
from hocket.fusion.rules.base import op_name
from hocket.fusion.rules.random import DRAWS
from hocket.fusion.shares import GradientMemory
from hocket.fusion.stacked import Stacked, is_stacked, mapped, unwrap
from hocket.fusion.trace import Traced

__all__ = ["FusedProgram", "Owner", "Step", "make_program"]

CANNOT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError)
SKIPPED = ("_assert", "_assert_is_none", "_assert_async", "_assert_tensor_metadata", "_assert_scalar")
PLAIN = {"amax": reduction.amax}  # faster than torch's own


class Owner(Protocol):
    """What a program needs of the fused module."""

    num_models: int
    strict: bool
    backend: str
    told: set[tuple[str, str]]  # ops without a rule that a warning has named
    gradient_memory: GradientMemory
    _hocket_form: str | None  # named while a captured step is compared with: as somebody who watches would see it

    @property
    def is_seeded(self) -> bool: ...
    def tensor(self, name: str) -> Stacked: ...
    def layers(self, name: str) -> tuple[nn.Module, ...]: ...
    def names_in(self, layer: str) -> list[str]: ...
    def separate_block(self, name: str) -> list[nn.Module] | None: ...
    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]: ...
    def all_parameters(self) -> list[Tensor]: ...
    def all_tensors(self) -> Mapping[str, Tensor]: ...


@dataclass
class Step:
    """One op.

    Attributes:
        backends: what can compute it, best known first; the chosen one is ``backends[0]``.
        used: what computed it last, for the report.
        plain: what computes it for one model, on plain tensors; None where that takes a rule.
        takes_tensors: whether `plain` wants the model's tensors by name before the arguments.
    """

    index: int
    layer: str
    op: str
    call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    args: Any
    kwargs: Any
    backends: list[str]
    dead: list[int] = field(default_factory=list)
    used: str = ""
    is_timed: bool = False
    can_multiply: Callable[..., bool] | None = None
    plain: Callable[..., Any] | None = None
    takes_tensors: bool = False


class FusedProgram:
    """Runs the steps; see `make_program`."""

    def __init__(self, owner: Owner, steps: list[Step], size: int, traced: Traced) -> None:
        self.owner = owner
        self.steps = steps
        self.traced = traced
        self._size = size
        self.inputs: list[tuple[int, int]] = []
        self.tensors: list[tuple[int, str]] = []
        self.constants: list[tuple[int, Any]] = []
        self.output: Any = None
        self.watch: Callable[[Step, tuple[Any, ...], dict[str, Any]], None] | None = None

    def run(self, leaves: list[Any]) -> Any:
        """The output for these leaves of the arguments, `Stacked` where models have their own.

        Raises:
            InputError: an op fails; names its layer.
        """
        values: list[Any] = [None] * self._size
        for place, number in self.inputs:
            values[place] = leaves[number]
        for place, value in self.constants:
            values[place] = value
        for place, name in self.tensors:
            values[place] = self.owner.tensor(name)
        for step in self.steps:
            args = _filled(step.args, values)
            kwargs = _filled(step.kwargs, values) if step.kwargs else {}
            if self.watch is not None:
                self.watch(step, args, kwargs)
            try:
                values[step.index] = self.perform(step, args, kwargs)
            except (HocketError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
                where = f"layer {step.layer}" if step.layer else "the model itself"
                shapes = ", ".join(str(unwrap(arg).dtype) for arg in args if isinstance(arg, (Stacked, Tensor)))
                raise InputError(f"{where}: {step.op}({shapes}): {error}") from error
            for dead in step.dead:
                values[dead] = None
        out = _filled(self.output, values)
        return out if self.traced.unflatten is None else self.traced.unflatten(out)

    def perform(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step by the first backend that can."""
        for backend in list(step.backends):
            try:
                result = step.call(backend, args, kwargs)
            except CANNOT:
                if backend != "vmap":
                    raise
                result = NotImplemented
            if result is not NotImplemented:
                if backend != "shared" or not step.used:
                    step.used = backend if is_stacked(result) or backend == "separate" else step.used or "shared"
                return result
            if backend == "rule":
                self._tell(step)
        raise InputError(f"layer {step.layer}: {step.op}: nothing can compute it for all models")

    def _tell(self, step: Step) -> None:
        """An op without a rule: say so, once for each."""
        told = self.owner.told
        if (step.op, step.layer) in told:
            return
        told.add((step.op, step.layer))
        where = f"layer {step.layer}" if step.layer else "the model itself"
        if self.owner.strict:
            raise InputError(f"{where}: {step.op}: no rule fuses it as it is called here (strict=True)")
        warnings.warn(f"hocket.fuse: {where}: {step.op} has no rule; it runs by vmap or a loop", stacklevel=2)


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
    return tree


class Ref:
    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def make_program(owner: Owner, traced: Traced) -> FusedProgram:
    """Find a rule for each op, and what may stand in for it."""
    nodes = list(traced.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    program = FusedProgram(owner, [], len(nodes), traced)

    def refer(tree: Any) -> Any:
        return mapped(tree, lambda value: Ref(places[value]) if isinstance(value, fx.Node) else value)

    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    inside: set[fx.Node] = set()  # of chains
    for node in nodes:
        if node in inside:
            continue
        chain = _chain(owner, node)
        if chain is not None:
            inside |= set(chain.nodes)
            step = _chain_step(program, chain, [_make_step(owner, traced, each, places[each]) for each in chain.nodes])
            step.args = refer(node.args)
            step.dead = [places[used] for used in node.all_input_nodes if last_use[used] is node]
            program.steps.append(step)
        elif node.op == "output":
            program.output = refer(node.args[0])
        elif node in traced.inputs:
            program.inputs.append((places[node], traced.inputs[node]))
        elif node in traced.tensors:
            program.tensors.append((places[node], traced.tensors[node]))
        elif node in traced.constants:
            program.constants.append((places[node], traced.constants[node]))
        elif node.op.startswith("call_") and not _is_assertion(node):
            step = _make_step(owner, traced, node, places[node])
            activate = in_place(node, owner.layers, lambda name: owner.separate_block(name) is None)
            if activate is not None:
                _activate_in_place(step, activate)
            step.args = refer(node.args)
            step.kwargs = refer(dict(node.kwargs))
            step.dead = [places[used] for used in node.all_input_nodes if last_use[used] is node]
            program.steps.append(step)
    return program


def _chain(owner: Owner, node: fx.Node) -> Chain | None:
    """The chain that begins at a node, where rules may be used."""
    if owner.backend not in ("auto", "rule"):
        return None
    found: Chain | None = find_chain(node, owner.layers, lambda name: owner.separate_block(name) is None)
    return found


def _chain_step(program: FusedProgram, chain: Chain, steps: list[Step]) -> Step:
    """One step for a chain, which goes op by op where the whole cannot be had."""
    owner = program.owner
    names = frozenset(owner.names_in(chain.layer))

    def lookup(name: str) -> Stacked | None:
        return owner.tensor(f"{chain.layer}.{name}") if name in names else None

    def one_by_one(value: Any, run: Callable[[Step, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        for position, step in enumerate(steps[1:], 1):
            rest, named = chain.rest(position)
            value = run(step, (value, *rest), named)
        return value

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_one = backend == "rule" and owner._hocket_form is None
        whole = chain.pool_all(args, lookup, owner.num_models) if in_one else NotImplemented
        if whole is not NotImplemented:
            return whole
        return one_by_one(program.perform(steps[0], args, {}), program.perform)

    def plain(tensors: Mapping[str, Tensor], *args: Any) -> Any:
        whole = chain.pool(args[0], args[1], args[2], plain_lookup(chain.layer, tensors))
        if whole is not None:
            return whole

        def run(step: Step, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            assert step.plain is not None
            return step.plain(*((tensors,) if step.takes_tensors else ()), *given, **named)

        return one_by_one(run(steps[0], args, {}), run)

    op = "+".join(step.op for step in steps)
    last = steps[-1].index
    return Step(last, steps[0].layer, op, call, (), {}, _order(owner), plain=plain, takes_tensors=True)


def _activate_in_place(step: Step, activate: Callable[..., Tensor]) -> None:
    """Let a step write over its input; see `hocket.fusion.in_place`."""
    usual = step.call

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if backend == "rule" and isinstance(args[0], Stacked):
            return Stacked(activate(args[0].tensor))
        return usual(backend, args, kwargs)

    step.call, step.plain = call, activate


def _is_assertion(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in SKIPPED or name.startswith("sym_constrain"):
        return True
    return name == "eq" and bool(node.users) and all(map(_is_assertion, node.users))


def _make_step(owner: Owner, traced: Traced, node: fx.Node, place: int) -> Step:
    layer = traced.layer(node)
    if node.op == "call_module":
        return _module_step(owner, traced, layer, place)
    target: Any = node.target
    name: str = op_name(target) or getattr(target, "__name__", None) or str(target)
    found = find(target)
    if node.op == "call_method":
        target = getattr(Tensor, str(node.target), None) or _method(str(node.target))
    site = Site(layer, name, owner.num_models, target, memory=owner.gradient_memory)
    draws = name in DRAWS or "dropout" in name

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws and not is_stacked(args) and not (kwargs and is_stacked(kwargs)):
            return target(*args, **kwargs)
        here = replace(site, generators=_generators(owner, args)) if draws or name.endswith("_") else site
        if backend == "rule":
            return NotImplemented if found is None else found(here, *args, **kwargs)
        if backend == "product":
            if not conv.is_product(*args, **kwargs):
                return NotImplemented
            return conv.product(here, *args, **kwargs)
        if backend == "vmap":
            return fallback.vmap(target, args, kwargs)
        return fallback.loop(
            [target] * owner.num_models, args, kwargs, f"layer {layer}" if layer else "the model itself"
        )

    backends = _order(owner)
    if name == "embedding":  # under vmap (torch 2.13) padding rows get a gradient
        backends = [backend for backend in backends if backend != "vmap"]
    timed = name.startswith("conv") or name in ("linear", "matmul", "bmm", "bilinear", "scaled_dot_product_attention")
    timed = timed or name in ("layer_norm", "group_norm", "batch_norm", "embedding_bag") or found is None
    step = Step(place, layer, name, call, (), {}, backends, is_timed=timed, can_multiply=_multiplies(name))
    if not (owner.is_seeded and (draws or name.endswith("_"))):
        step.plain = PLAIN.get(name, target)
    return step


def _multiplies(name: str) -> Callable[..., bool] | None:
    return conv.is_product if name in ("conv1d", "conv2d", "conv3d") else None


def _order(owner: Owner) -> list[str]:
    rest = {"vmap": ["vmap", "rule", "loop"], "loop": ["loop"]}
    return list(rest.get(owner.backend, ["rule", "vmap", "loop"]))


def _method(name: str) -> Callable[..., Any]:
    """A method of something that is no tensor, such as ``shape.numel()``."""
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def _generators(owner: Owner, args: tuple[Any, ...]) -> tuple[torch.Generator, ...]:
    first = next((unwrap(arg) for arg in args if isinstance(arg, (Stacked, Tensor))), None)
    return owner.generators_on(torch.device("cpu") if first is None else first.device)


def _module_step(owner: Owner, traced: Traced, layer: str, place: int) -> Step:
    shells = owner.layers(layer)
    kind = type(shells[0]).__name__
    blocks = owner.separate_block(layer)
    if blocks is not None:

        def separate(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return fallback.loop(blocks, args, kwargs, f"layer {layer}")

        return Step(place, layer, kind, separate, (), {}, ["separate"], plain=blocks[0])
    found = find_module(shells[0])
    names = owner.names_in(layer)
    prefix = f"{layer}." if layer else ""
    known = frozenset(names)

    def lookup(name: str) -> Stacked | None:
        return owner.tensor(prefix + name) if name in known else None

    site = Site(layer, kind, owner.num_models, shells[0].forward, shells, lookup)

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = replace(site, generators=_generators(owner, args))
        if backend == "rule":
            return NotImplemented if found is None else found(here, *args, **kwargs)
        tensors = {name: owner.tensor(prefix + name) for name in names}
        if backend == "vmap":
            return fallback.vmap(
                lambda own, *a, **k: torch.func.functional_call(shells[0], own, a, k), (tensors, *args), kwargs
            )
        targets = [lambda own, *a, shell=shell, **k: torch.func.functional_call(shell, own, a, k) for shell in shells]
        return fallback.loop(targets, (tensors, *args), kwargs, f"layer {layer}")

    step = Step(place, layer, kind, call, (), {}, _order(owner), is_timed=bool(names))
    if type(shells[0]) in norm.BATCH_NORMS:
        step.plain, step.takes_tensors = norm.plain_batch_norm(shells[0], prefix, known), True
    elif not names and not owner.is_seeded:
        step.plain = shells[0].forward
    return step
