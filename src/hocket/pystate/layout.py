"""Layout of Python objects: C memory, slots and dicts of an instance, and the owner of its class."""

from __future__ import annotations

import functools
import sys
import threading
import types
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from hocket.pystate.origins import origin
from hocket.pystate.places import is_a

_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # flags of CPython's
_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def foreign_base(kind: type) -> type | None:
    """Return the C base class that gives instances memory hidden from attributes. None for pure Python classes."""
    for base in kind.__mro__[:-1]:
        parent = base.__base__
        if parent is None:
            continue
        shown = 8 * len(_own_slots(base))
        shown += 8 * (base.__weakrefoffset__ > 0 and not parent.__weakrefoffset__)
        shown += 8 * (base.__dictoffset__ != 0 and not parent.__dictoffset__)
        if base.__basicsize__ > parent.__basicsize__ + shown:
            return base
    return None


def _own_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if is_a(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class and its bases."""
    if kind not in _SLOTS:
        _SLOTS[kind] = tuple(
            slot
            for base in kind.__mro__
            for slot in _own_slots(base)
            if type(vars(base).get(slot)) is types.MemberDescriptorType
        )
    return _SLOTS[kind]


def slot_value(value: Any, slot: str) -> tuple[Any, ...]:
    """Return the value in a slot without running code of the class. Empty if the slot is."""
    try:
        return (object.__getattribute__(value, slot),)
    except AttributeError:
        return ()


def instance_dict(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an instance, asked without running code of its class. None where it has none."""
    if is_a(value, threading.local):
        table: Any = value.__dict__  # of this thread; there is no descriptor of it
        return table if type(table) is dict else None
    for base in type(value).__mro__:
        descriptor: Any = vars(base).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            table = descriptor.__get__(value)
            return table if type(table) is dict else None
    return None


def attribute_of(value: Any, name: str) -> Any:
    """The attribute of an object, or None where there is none, or where only code of the user's could tell."""
    table, kind = instance_dict(value), type(value)
    found = in_class(kind, name)
    if table is not None and name in table:
        is_hidden = found is not None and in_class(type(found), "__set__") is not None  # by a property, say
        return None if is_hidden or _is_python(kind, "__getattribute__") else table[name]
    if found is None and in_class(kind, "__getattr__") is torch.nn.Module.__getattr__:
        registered = (table or {}).get("_modules", {}), (table or {}).get("_buffers", {})
        return next((each[name] for each in registered if name in each), None)
    is_told = found is None or is_a(found, property)
    if is_a(value, types.ModuleType) or not (is_told or _is_python(type(found), "__get__")):
        return None if _is_python(kind, "__getattribute__") else getattr(value, name, None)
    return None


def in_class(kind: type, name: str) -> Any:
    """The attribute of a class or of one of its bases, without running code of theirs. None if there is none."""
    for base in kind.__mro__:
        if name in (table := vars(base)):
            return table[name]
    return None


def _is_python(kind: type, name: str) -> bool:
    return is_a(in_class(kind, name), types.FunctionType)


def is_changeable(kind: type) -> bool:
    """Return whether attributes of a class can be set, and its instances given another class."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE


def origin_of(kind: type) -> str:
    """The owner of a class (see `hocket.pystate.origins.origin`). Empty for builtins."""
    return _origin_of_module(kind.__module__)


@functools.cache
def _origin_of_module(name: str) -> str:
    if name == "builtins":
        return ""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return "user" if name == "__main__" or module is None else ""
    return origin(file)


def weakly(value: Any) -> Any:
    """The one weak reference to an object, which may run code where it ends in the step, or itself if there is none."""
    if type(value) is not dict and type(value) is not list:
        with suppress(TypeError):
            return ref(value)
    return value
