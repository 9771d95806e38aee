"""Objects that models hold in common, such as a config, and memory that two tensors of a model share.

A copy of the models holds the same objects. Shared memory is refused, because stacking would separate it:

    self.decoder.weight.data = self.encoder.weight.data     two parameters, updated twice a step
    self.register_buffer("first", self.weight.data)         follows the parameter as it trains
    self.table = self.weight.detach().numpy()               the same

The models that were fused, which no forward of a copy may reach.

    self.layer(x)                             the copy's layer, whose tensors are parts of the stacked ones
    LAYERS[self.number](x)                    the original's layer: it is not what trains
    (a closure, a default argument, a class, a cache, a weak reference, a helper that copies share: the same)

`copy.deepcopy` shares what code holds, and nothing says beforehand what a forward will reach. So the first calls of a
kind are recorded, also where no graph is wanted, and a recorder looks at the modules that are called and at tensors, if
they are no part of the model that it records.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.rules.base import where
from hocket.pystate.layout import instance_dict, slot_value, slots_of
from hocket.pystate.places import is_a, is_immutable

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
    """The objects that more than one model holds, or all objects of a single model. User code may change them."""
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
    shared = [each for key, each in objects.items() if counts[key] >= enough]
    return [each for each in shared if not any(id(inner) in own for inner in reached(each, set()))]


def held_by(function: Any) -> list[Any]:
    """Objects that a function holds: closure, defaults, the object of a method, the arguments of a partial."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # not assigned yet
            cells.append(cell.cell_contents)
    named = (getattr(function, "__kwdefaults__", None) or {}).values()
    defaults = getattr(function, "__defaults__", None) or ()
    return [getattr(function, "__self__", None), *cells, *defaults, *named]


def held(value: Any, depth: int = 8) -> Iterator[Any]:
    """Objects that a function holds in closures and defaults, with what functions in these hold, or a reference."""
    if is_a(value, MethodType):
        value = value.__func__
    if is_a(value, FunctionType) and depth:
        for each in held_by(value):
            yield each
            yield from held(each, depth - 1)
    elif is_a(value, partial):
        yield from held(value.func, depth)
    elif is_a(value, weakref.ref) and is_a(value(), nn.Module):  # torch's own are of parameters, and made anew
        yield value()


def reached(value: Any, seen: set[int], depth: int = 8) -> Iterator[Any]:
    """A value and the objects inside of it, without numbers and text. Modules, tensors and functions are not opened."""
    if is_immutable(value) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    yield value
    if not is_a(value, _WHOLE):
        for each in inside(value):
            yield from reached(each, seen, depth - 1)


def inside(value: Any) -> list[Any]:
    """The contents of a container or an object."""
    if is_a(value, dict):
        return list(dict.values(value))
    if is_a(value, (list, tuple, set, frozenset)):
        base = next(kind for kind in (list, tuple, set, frozenset) if is_a(value, kind))
        return list(base.__iter__(value))
    held = list((instance_dict(value) or {}).values())
    return held + [found for key in slots_of(type(value)) for found in slot_value(value, key)]


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its parameters and buffers by each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


Span = tuple[str, int, int]  # the device, and the bytes from the first to behind the last


def check_memory(models: Sequence[nn.Module]) -> None:
    """Refuse a parameter or buffer that shares memory with another tensor or array of these models."""
    found = sorted(
        (*span, is_named, f"model {index}: {name}")
        for index, model in enumerate(models)
        for name, value, is_named in _values(model)
        if (span := _span(value)) is not None
    )
    last: dict[tuple[str, bool], tuple[int, str]] = {}  # by device, of parameters and of others: the furthest so far
    for device, begin, end, is_named, name in found:
        for other_is_named in (True, False) if is_named else (True,):
            reached, other = last.get((device, other_is_named), (0, ""))
            if begin < reached:
                raise InputError(
                    f"{name} shares memory with {other}, and would not when models are stacked; make it the same "
                    "tensor, or clone it"
                )
        last[device, is_named] = max(last.get((device, is_named), (0, "")), (end, name))


def _values(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Every tensor and array once, and whether it is a parameter or buffer."""
    named = {id(tensor): (name, tensor) for name, tensor in reversed(named_tensors(model))}
    for name, tensor in named.values():
        yield name, tensor, True
    seen = set(named)
    for path, value in attributes_of(model):
        for inner in reached(value, set()):
            for each in (inner, *held(inner)):
                if id(each) not in seen:
                    seen.add(id(each))
                    yield path, each, False


def _span(value: Any) -> Span | None:
    """The addresses of a tensor or an array of numpy, or None for anything else, and for tensors without memory."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type not in ("cpu", "cuda") or not value.numel():
            return None
        shape, strides, begin = value.shape, value.stride(), value.data_ptr()
        size_bytes = value.element_size()
        length = size_bytes * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
        return str(value.device), begin, begin + length
    array = getattr(value, "__array_interface__", None)
    if type(value).__module__ != "numpy" or array is None or not value.size:
        return None
    offsets = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
    begin = array["data"][0] + sum(min(0, offset) for offset in offsets)
    return "cpu", begin, begin + value.itemsize + sum(map(abs, offsets))


Known = Mapping[Any, tuple[int, str]]  # models and names, by what `_keys` gives


def stray(model: int, place: str) -> InputError:
    """The error for a part of a model that its copy does not have as its own."""
    return InputError(
        f"model {model}, {place}: no copy of the model takes it along: a closure, a global, a class, a cache or an "
        "object that copies share holds it, or its class says how it is copied; reach it through self, by attributes"
    )


def check_part(known: Known, part: Any) -> None:
    """Refuse a module or tensor that is one of these, or shares memory with them."""
    for key in _keys(part):
        if key in known:
            raise stray(*known[key])


class Originals:
    """Weak references to the modules and tensors of the models that an array was made from, with their names."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # what tells a part from others, whether it still lives, its model and its name
        self._parts: list[tuple[Any, Callable[[], bool], int, str]] = []
        for index, model in enumerate(models):
            self.add(model, index)

    def add(self, model: nn.Module, index: int) -> None:
        """A model has come into a slot."""
        named: list[tuple[str, Any]] = [*named_tensors(model), *model.named_modules()]
        self._parts += [(key, lives, index, where(name)) for name, part in named for key, lives in _keys(part).items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Originals, ((),)  # a saved array has copies alone

    def known(self, inputs: Any) -> Known:
        """The parts that still live, but for inputs, which may be any tensors."""
        given = {key for leaf in pytree.tree_leaves(inputs) for key in _keys(leaf)}
        self._parts = [each for each in self._parts if each[1]()]
        return {key: (index, place) for key, _, index, place in self._parts if key not in given}


def _keys(part: Any) -> dict[Any, Callable[[], bool]]:
    """Return the keys by which a tensor, its memory or a module is recognised, each with a check that it lives."""
    if not is_a(part, (nn.Module, Tensor)):
        return {}
    reference = weakref.ref(part)
    found: dict[Any, Callable[[], bool]] = {id(part): lambda: reference() is not None}
    if is_a(part, Tensor) and part.layout is torch.strided and part.device.type in ("cpu", "cuda"):
        try:
            memory = part.untyped_storage()
            address = memory.data_ptr()
        except (NotImplementedError, RuntimeError):  # in a transform, or without data
            return found
        if address:
            kept = StorageWeakRef(memory)
            found[address] = lambda: not kept.expired()
    return found
