"""How Python objects are laid out: which C memory, slots and dicts an instance has, and whose its class is."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from hocket.pystate.executed import origin

__all__ = ["foreign_base", "has_plain_dict", "origin_of", "slot_value", "slots_of"]


_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def foreign_base(kind: type) -> type | None:
    """The C class that gives instances memory that no attribute shows; None for classes written in Python."""
    for base in kind.__mro__[:-1]:
        slots = len(_own_slots(base))
        if base.__base__ is not None and base.__basicsize__ > base.__base__.__basicsize__ + 16 + 8 * slots:
            return base
    return None


def _own_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class and its bases."""
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = tuple(_slots(kind))
    return found


def _slots(kind: type) -> Iterator[str]:
    yield from (
        slot
        for base in kind.__mro__
        for slot in _own_slots(base)
        if type(vars(base).get(slot)) is types.MemberDescriptorType
    )


def slot_value(value: Any, slot: str) -> tuple[Any, ...]:
    """What is in a slot, asked without running code of the class; empty if nothing is."""
    try:
        return (object.__getattribute__(value, slot),)
    except AttributeError:
        return ()


def has_plain_dict(kind: Any) -> bool:
    """Whether ``__dict__`` is the usual one, so that asking for it runs no code of the class."""
    return kind.__dictoffset__ != 0 and kind.__getattribute__ in (object.__getattribute__, type.__getattribute__)


def origin_of(kind: type) -> str:
    """Whose a class is (see `hocket.pystate.executed.origin`); empty for builtins."""
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
