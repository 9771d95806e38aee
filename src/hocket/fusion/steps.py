"""The steps of a fused program: for each op or layer of a traced model, what computes it for all models at once.

rule      the op's own, on stacked tensors
vmap      torch's, where there is no rule
loop      the op on one model after another
separate  the models' own blocks, where these did not fuse
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from hocket.errors import InputError
from hocket.fusion import fallback
from hocket.fusion.model_slice import ModelSlice
from hocket.fusion.rules import OpContext, find, find_module, norm
from hocket.fusion.rules.base import op_name, where
from hocket.fusion.rules.pointwise import NUMBERS
from hocket.fusion.rules.random import DRAWS, drawing, each
from hocket.fusion.stacked import Stacked, is_stacked, unwrap
from hocket.fusion.trace import Traced
from hocket.fusion.writes import Write

__all__ = ["Step", "activate_in_place", "op_step", "warn_without_rule"]


@dataclass
class Step:
    """One op.

    Attributes:
        backends: what can compute it, best known first; the chosen one is ``backends[0]``.
        used: what computed it last, for the report.
        plain: what computes it for one model, on plain tensors; None where that takes a rule.
        takes_tensors: whether `plain` wants the model's tensors by name before the arguments.
        takes_numbers: whether the rule takes numbers that differ between models (`ModelValues`).
        draws: whether it draws random numbers.
        write: what is known of it where it writes over its first argument.
        must_view: whether its result has to be a view of its first argument, because one of them is written to.
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
    plain: Callable[..., Any] | None = None
    takes_tensors: bool = False
    takes_numbers: bool = False
    draws: bool = False
    write: Write | None = None
    must_view: bool = False


def op_step(models: ModelSlice, traced: Traced, node: fx.Node, place: int) -> Step:
    """The step of one op or layer, and what may stand in for its rule."""
    layer = traced.layer(node)
    if node.op == "call_module":
        return _module_step(models, traced, layer, place)
    target: Any = node.target
    name: str = op_name(target) or getattr(target, "__name__", None) or str(target)
    found = find(target)
    if node.op == "call_method":
        target = getattr(Tensor, str(node.target), None) or _method(str(node.target))
    context = OpContext(layer, name, models.num_models, target, memory=models.gradient_memory)
    is_known = isinstance(node.target, str) or op_name(target) is not None
    draws = name in DRAWS or not is_known

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws and not is_stacked(args) and not (kwargs and is_stacked(kwargs)):
            return target(*args, **kwargs)
        here = replace(context, generators=_generators(models, args)) if draws else context
        if backend == "rule":
            return NotImplemented if found is None else found(here, *args, **kwargs)
        if backend == "vmap":
            return fallback.vmap(target, args, kwargs, models.num_models)
        return each(here, *args, **kwargs)

    backends = _order(models)
    if draws and models.is_seeded:  # under vmap all would draw from torch's own generator
        backends = [backend for backend in backends if backend != "vmap"]
    if name in ("embedding", "unfold"):  # under vmap (torch 2.13) padding rows get a gradient, and axes are mistaken
        backends = [backend for backend in backends if backend != "vmap"]
    step = Step(place, layer, name, call, (), {}, backends)
    step.draws = draws
    step.takes_numbers = name in NUMBERS or "dropout" in name
    if not (models.is_seeded and draws):
        step.plain = target
    return step


def _order(models: ModelSlice) -> list[str]:
    rest = {"vmap": ["vmap", "rule", "loop"], "loop": ["loop"]}
    return list(rest.get(models.settings.backend, ["rule", "vmap", "loop"]))


def _method(name: str) -> Callable[..., Any]:
    """A method of something that is no tensor, such as ``shape.numel()``."""
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def _generators(models: ModelSlice, args: tuple[Any, ...]) -> tuple[torch.Generator, ...]:
    first = next((unwrap(arg) for arg in args if isinstance(arg, (Stacked, Tensor))), None)
    return models.generators_on(torch.device("cpu") if first is None else first.device)


def _module_step(models: ModelSlice, traced: Traced, layer: str, place: int) -> Step:
    templates = models.layers(layer)
    kind = type(templates[0]).__name__
    blocks = models.separate_block(layer)
    if blocks is not None:

        def separate(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own: list[Callable[..., Any]] = list(blocks)
            for index, generator in enumerate(_generators(models, args)):
                own[index] = drawing(own[index], generator)
            return fallback.loop(own, args, kwargs, where(layer))

        plain = None if models.is_seeded else blocks[0]
        return Step(place, layer, kind, separate, (), {}, ["separate"], plain=plain)
    found = find_module(templates[0])
    names = models.names_in(layer)
    prefix = f"{layer}." if layer else ""
    known = frozenset(names)

    def lookup(name: str) -> Stacked | None:
        return models.tensor(prefix + name) if name in known else None

    context = OpContext(layer, kind, models.num_models, templates[0].forward, templates, lookup)

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = replace(context, generators=_generators(models, args))
        if backend == "rule":
            return NotImplemented if found is None else found(here, *args, **kwargs)
        tensors = {name: models.tensor(prefix + name) for name in names}
        if backend == "vmap":
            return fallback.vmap(
                lambda own, *a, **k: torch.func.functional_call(templates[0], own, a, k),
                (tensors, *args),
                kwargs,
                models.num_models,
            )
        targets = [
            lambda own, *a, template=template, **k: torch.func.functional_call(template, own, a, k)
            for template in templates
        ]
        if here.generators:
            targets = [drawing(target, generator) for target, generator in zip(targets, here.generators, strict=True)]
        return fallback.loop(targets, (tensors, *args), kwargs, where(layer))

    backends = [backend for backend in _order(models) if backend != "vmap" or not models.is_seeded]
    step = Step(place, layer, kind, call, (), {}, backends)
    if type(templates[0]) in norm.BATCH_NORMS:
        step.plain, step.takes_tensors = norm.plain_batch_norm(templates[0], prefix, known), True
    elif not names and not models.is_seeded:
        step.plain = templates[0].forward
    return step


def activate_in_place(step: Step, activate: Callable[..., Tensor]) -> None:
    """Let a step write over its input; see `hocket.fusion.in_place`."""
    usual = step.call

    def call(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if backend == "rule" and isinstance(args[0], Stacked):
            return Stacked(activate(args[0].tensor))
        return usual(backend, args, kwargs)

    step.call, step.plain = call, activate


def warn_without_rule(models: ModelSlice, step: Step) -> None:
    """Warn of an op without a rule, once for each.

    Raises:
        InputError: the module is strict.
    """
    if (step.op, step.layer) in models.settings.warned:
        return
    models.settings.warned.add((step.op, step.layer))
    if models.settings.strict:
        raise InputError(f"{where(step.layer)}: {step.op}: no rule fuses it as it is called here (strict=True)")
    warnings.warn(f"hocket.fuse: {where(step.layer)}: {step.op} has no rule; it runs by vmap or a loop", stacklevel=2)
