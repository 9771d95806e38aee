"""Whether the losses of several trials are one function, so that it may be called once for all of them.

``train`` is called for each trial and often makes its loss anew: a lambda, a partial, a module. Two of them are the
same where their code and all that it reads besides globals are equal; what cannot be compared counts as different, and
each model's loss is then called by itself.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

__all__ = ["is_same_loss", "reads_model"]


def is_same_loss(first: Any, second: Any) -> bool:
    """Whether two loss functions are provably the same.

    Example:
        >>> def make(smoothing):
        ...     return lambda outputs, target: nn.functional.cross_entropy(outputs, target, label_smoothing=smoothing)
        >>> is_same_loss(make(0.1), make(0.1)), is_same_loss(make(0.1), make(0.2))
        (True, False)
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, types.FunctionType):
        return _is_same_function(first, second)
    if isinstance(first, functools.partial):
        mine, its = ((each.func, each.args, each.keywords) for each in (first, second))
        return _is_equal(mine, its)
    if isinstance(first, types.MethodType):
        return first.__func__ is second.__func__ and _is_equal(first.__self__, second.__self__)
    return _is_equal(first, second)


def reads_model(function: Any, model: nn.Module) -> bool:
    """Whether a function holds a model, a layer or a tensor of it, in its closure, its defaults or an object of these.

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
        ahead += _held(each)
    if all(isinstance(each, types.FunctionType) for each in held.values()):
        return False
    return any(id(each) in held for each in (*model.modules(), *model.parameters(), *model.buffers()))


def _held(value: Any) -> list[Any]:
    """What an object holds; a function what it closes over, and not what is global."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    own = list(vars(value).values()) if hasattr(value, "__dict__") else []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    return [*own, *(getattr(value, name) for name in slots if hasattr(value, name))]


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _is_same_function(first: types.FunctionType, second: types.FunctionType) -> bool:
    if first.__code__ is not second.__code__ or first.__globals__ is not second.__globals__:
        return False
    if not _is_equal((first.__defaults__, first.__kwdefaults__), (second.__defaults__, second.__kwdefaults__)):
        return False
    cells = [each.__closure__ or () for each in (first, second)]
    try:
        contents = [tuple(cell.cell_contents for cell in own) for own in cells]
    except ValueError:  # a cell that is still empty
        return False
    return _is_equal(*contents)


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (bool, int, float, complex, str, bytes, set)):
        return bool(first == second)
    if type(first) in (tuple, list):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, (types.FunctionType, types.MethodType, functools.partial)):
        return is_same_loss(first, second)
    if type(first).__module__ == "torch.nn.modules.loss" and isinstance(first, nn.Module):
        return _is_equal(_contents(first), _contents(second))
    return False


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: dict(value) if name.startswith("_") and value else value for name, value in vars(module).items()}
