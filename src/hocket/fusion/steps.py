"""The steps of a fused program: for each op or layer of a traced model, what computes it for all models at once.

rule      the op's own, on stacked tensors
vmap      torch's, where there is no rule
loop      the op on one model after another
separate  the models' own blocks, where these did not fuse
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.errors import InputError
from hocket.fusion import fallback
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.known_functions import STRIDED, is_write
from hocket.fusion.rules import OpContext, find
from hocket.fusion.rules.base import op_name, where
from hocket.fusion.rules.pointwise import NUMBERS
from hocket.fusion.rules.random import DRAWS, WITH_RATES, drawing, each
from hocket.fusion.stacked import Stacked, is_stacked, laid_out, unwrap
from hocket.fusion.store import Store
from hocket.fusion.traced import Traced
from hocket.fusion.writes import in_place
from hocket.pystate.origins import level_of_user

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


@dataclass
class Step:
    """One op."""

    index: int  # the place of its result
    layer: str  # the name of the layer it belongs to
    op: str  # its name, or the class of a separate block
    call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]  # computes it by one of `backends` on `Stacked` values
    backends: list[str]  # what can compute it, best known first
    args: Any = ()  # its arguments, with `Ref` in place of values
    kwargs: Any = field(default_factory=dict)  # the same
    dead: list[int] = field(default_factory=list)  # places of values that are not needed any more behind it
    used: str = ""  # what computed it last, for the report
    alone: Sequence[Callable[..., Any]] = ()  # what computes it for each model by itself, on plain tensors
    takes_numbers: bool = False  # whether the rule takes numbers that differ between models (`ModelValues`)
    draws: bool = False  # whether it draws random numbers
    orders: tuple[tuple[int, ...], ...] = ()  # of its context, but for a write
    write: tuple[int, ...] | None = None  # the places of all names of its first argument, where it writes over that
    # whether its result has to be a view of its first argument, because one of them is written to
    must_view: bool = False


def make_step(store: Store, settings: Settings, traced: Traced, node: fx.Node, place: int) -> Step:
    """The step of one op or separate block, and what may stand in for its rule."""
    layer = traced.layer(node)
    if node.op == "call_module":
        return _block_step(store, store.group(store.separate_index[layer]), layer, place, node)
    target: Any = node.target
    name: str = op_name(target) or getattr(target, "__name__", None) or str(target)
    is_known, rule = isinstance(target, str) or op_name(target) is not None, find(target)
    if node.op == "call_method":
        target = getattr(Tensor, str(node.target))
    plain = target
    activate = in_place(node)
    if activate is not None:
        plain, rule = activate, _activated(activate)
    orders = node.meta.get("orders", ()) if store.seeds is not None else ()
    context = OpContext(layer, name, (target,) * store.num_models, orders=orders, memory=store.memory)
    draws = name in DRAWS or not is_known
    step = Step(place, layer, name, _caller(store, context, rule, draws), _backends(store, settings, draws))
    step.orders = () if is_write(name) else orders
    if name in WITHOUT_VMAP:
        step.backends = [backend for backend in step.backends if backend != "vmap"]
    if name in STRIDED:
        step.backends = ["rule"]  # a model's part of a stacked tensor lies elsewhere in memory than alone
    step.draws, step.takes_numbers = draws, name in NUMBERS or name in WITH_RATES
    step.alone = _drawing(store, [plain] * store.num_models) if draws else [plain] * store.num_models
    return step


def _block_step(store: Store, blocks: list[nn.Module], layer: str, place: int, node: fx.Node) -> Step:
    """A block of which each model has its own."""
    orders = node.meta["orders"] if store.seeds is not None else ()
    context = OpContext(layer, type(blocks[0]).__name__, tuple(blocks), orders=orders, memory=store.memory)
    step = Step(place, layer, context.name, _caller(store, context, None, True), ["separate"])
    step.alone = _drawing(store, blocks)
    return step


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


def _backends(store: Store, settings: Settings, draws: bool) -> list[str]:
    found = BACKENDS.get(settings.backend, ["rule", "vmap", "loop"])
    # Under vmap all would draw from torch's own generator.
    return [backend for backend in found if backend != "vmap" or not (draws and store.seeds is not None)]


def _activated(activate: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda context, input, *options, **named: Stacked(activate(input.tensor))


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
