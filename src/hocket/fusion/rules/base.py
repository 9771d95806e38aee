"""The form of a rule, and the tables in which rules are found.

A rule computes one op for all models at once. It gets an `OpContext`, and the op's own arguments, in which a value that
differs between models is a `Stacked`. It returns a `Stacked` (or a tree of them), or ``NotImplemented`` where it does
not apply, and the op falls back to ``vmap`` or to a loop.

Rules are found by the op's name, so one serves ``torch.relu``, ``F.relu``, ``Tensor.relu`` and ``aten.relu.default``.
Layers have none: their forwards call the ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.fusion.gradients import GradientMemory

Rule = Callable[..., Any]

# Operators of Python that write: torch.fx would read ``x = x + y``, so that another name would keep the old value.
WRITTEN = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = frozenset(f"i{name}" for name in WRITTEN)

_OPS: dict[str, Rule] = {}

_TORCH = ("torch", "torch._C._nn", "torch.nn.functional", "torch.functional", "torch._VF", "torch._C", "torch.special")


@dataclass(frozen=True)
class OpContext:
    """The place of an op in the models."""

    layer: str  # the name of the layer it belongs to, for messages and the report
    name: str  # the op's name, as `op_name` gives it
    targets: tuple[Callable[..., Any], ...]  # the op as each model calls it, a function of plain tensors
    # one random generator per model, or empty where all draw from torch's own
    generators: tuple[torch.Generator, ...] = field(default=(), repr=False)
    # in which order the axes of each tensor among the arguments lie in memory where a model is alone; empty if that
    # does not matter
    orders: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    # for gradients of parameters, kept from step to step; None where there is none
    memory: GradientMemory | None = field(default=None, repr=False)

    @property
    def num_models(self) -> int:
        """B."""
        return len(self.targets)

    @property
    def target(self) -> Callable[..., Any]:
        """The op as the first model calls it."""
        return self.targets[0]

    @property
    def where(self) -> str:
        """The layer, as messages say it."""
        return where(self.layer)


def where(layer: str) -> str:
    """A layer's name as messages say it."""
    return f"layer {layer}" if layer else "the model itself"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the ops of these names."""

    def register(function: Rule) -> Rule:
        _OPS.update(dict.fromkeys(names, function))
        return function

    return register


def op_name(target: Any) -> str | None:
    """The name under which an op's rule is found, or None for a function that is not torch's.

    Example:
        >>> op_name(torch.nn.functional.relu), op_name(torch.ops.aten.add.Tensor), op_name("view")
        ('relu', 'add', 'view')
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::") if target.namespace == "aten" else None
    own_name: str = getattr(target, "__name__", "")
    if target is getattr or getattr(operator, own_name, None) is target:
        return own_name
    module = getattr(target, "__module__", None) or ""
    if module in _TORCH or type(target).__name__ in ("builtin_function_or_method", "method_descriptor"):
        return own_name
    return None


def is_watched() -> bool:
    """True if this call is being traced, so that nothing may be timed and no value looked at."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def find(target: Any) -> Rule | None:
    """The rule for an op, or None."""
    name = op_name(target)
    if name is None:
        return None
    if name in _OPS:
        return _OPS[name]
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return _OPS["pointwise"]
    return None
