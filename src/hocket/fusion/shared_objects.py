"""Objects that models hold in common, such as a config: a copy of the models holds the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from hocket.pystate.layout import instance_dict, slot_value, slots_of
from hocket.pystate.places import is_a, is_immutable

__all__ = ["attributes_of", "held", "held_by", "held_in_common", "inside", "reached"]

# Not looked into: a copy shares them, or has its own.
_WHOLE = (type, FunctionType, ModuleType, nn.Module, Tensor)
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}


def attributes_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a model's modules, by path, but tensors and submodules that these register."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _MACHINERY:
                yield f"{name}.{key}" if name else key, value


def held_in_common(models: Sequence[nn.Module]) -> list[Any]:
    """The objects that more than one model holds; of a single model all that hold nothing of its own.

    Whoever keeps such an object from outside may change it, and the models are to follow.
    """
    counts: Counter[int] = Counter()
    objects: dict[int, Any] = {}
    for model in models:
        found: dict[int, Any] = {}
        for _, value in attributes_of(model):
            for each in reached(value, set()):
                found.setdefault(id(each), each)
        counts.update(found.keys())
        objects |= found
    enough = min(len(models), 2)
    own = {id(each) for model in models for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return [each for key, each in objects.items() if counts[key] >= enough and not _holds_any(each, own)]


def held_by(function: Any) -> list[Any]:
    """What a function brings along: closure, defaults, the object of a method, the arguments of a partial."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if not _is_empty(cell)]
    named = (getattr(function, "__kwdefaults__", None) or {}).values()
    defaults = getattr(function, "__defaults__", None) or ()
    return [getattr(function, "__self__", None), *cells, *defaults, *named]


def held(value: Any, depth: int = 8) -> Iterator[Any]:
    """The objects that a function holds in closures and defaults, with what functions in these hold."""
    if is_a(value, MethodType):
        value = value.__func__
    if is_a(value, FunctionType) and depth:
        for each in held_by(value):
            yield each
            yield from held(each, depth - 1)
    elif is_a(value, partial):
        yield from held(value.func, depth)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return True
    return False


def _holds_any(value: Any, own: set[int]) -> bool:
    """True if a model's own tensors or modules are reached from an object."""
    return any(id(each) in own for each in reached(value, set()))


def reached(value: Any, seen: set[int], depth: int = 8) -> Iterator[Any]:
    """A value and what it holds, but for plain values; modules, tensors and functions as they are."""
    if is_immutable(value) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    yield value
    if not is_a(value, _WHOLE):
        for each in inside(value):
            yield from reached(each, seen, depth - 1)


def inside(value: Any) -> list[Any]:
    """What a container or an object holds."""
    if is_a(value, dict):
        return list(dict.values(value))
    if is_a(value, (list, tuple, set, frozenset)):
        base = next(kind for kind in (list, tuple, set, frozenset) if is_a(value, kind))
        return list(base.__iter__(value))
    held = list((instance_dict(value) or {}).values())
    return held + [found for key in slots_of(type(value)) for found in slot_value(value, key)]
