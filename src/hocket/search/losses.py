"""Comparison of the losses of several trials: one function may be called once for all of them.

``train`` is called for each trial and often makes its loss anew: a lambda, a partial, a module. Two of them are the
same where their code and all that it reads besides globals are equal; what cannot be compared counts as different, and
each model's loss is then called by itself.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from hocket.fusion.shared_objects import held_by, inside
from hocket.fusion.stacked import is_same

__all__ = ["is_same_loss", "reads_model"]

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def is_same_loss(first: Any, second: Any) -> bool:
    """True if two loss functions are provably the same.

    Example:
        >>> def make(smoothing):
        ...     return lambda outputs, target: nn.functional.cross_entropy(outputs, target, label_smoothing=smoothing)
        >>> is_same_loss(make(0.1), make(0.1)), is_same_loss(make(0.1), make(0.2))
        (True, False)
    """
    return is_same(first, second, _is_like)


def _is_like(first: Any, second: Any) -> bool:
    """True if two functions, of one type, do the same."""
    if isinstance(first, types.FunctionType):
        same_code = first.__code__ is second.__code__ and first.__globals__ is second.__globals__
        return same_code and is_same_loss(held_by(first), held_by(second))
    if isinstance(first, functools.partial):
        mine, its = ((each.func, each.args, each.keywords) for each in (first, second))
        return is_same_loss(mine, its)
    if isinstance(first, types.MethodType):
        return first.__func__ is second.__func__ and is_same_loss(first.__self__, second.__self__)
    if isinstance(first, nn.Module) and type(first).__module__ == "torch.nn.modules.loss":
        return is_same_loss(vars(first), vars(second))
    return isinstance(first, set) and bool(first == second)


def reads_model(function: Any, model: nn.Module) -> bool:
    """True if a function holds a model, a layer or a tensor of it, in its closure, its defaults or an object of these.

    In a fused slot a trial's own model does not move, so a loss or a metric that reads it would see old weights.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> reads_model(lambda outputs, target: outputs.mean() + model.weight.norm(), model)
        False
        >>> def make(model):
        ...     return lambda outputs, target: outputs.mean() + model.weight.norm()
        >>> reads_model(make(model), model)
        True
    """
    held: dict[int, Any] = {}
    ahead = [function]
    while ahead:
        each = ahead.pop()
        if id(each) in held or isinstance(each, (type, types.ModuleType, str, bytes, int, float, types.NoneType)):
            continue
        held[id(each)] = each
        ahead += held_by(each) if isinstance(each, FUNCTIONS) else inside(each)
    if all(isinstance(each, types.FunctionType) for each in held.values()):
        return False
    return any(id(each) in held for each in (*model.modules(), *model.parameters(), *model.buffers()))
