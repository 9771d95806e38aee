"""Places where a step finds a generator of numbers or a method of one, and what may stand there in their place.

An object of `random` gets the methods in its own dict, wherever it is held. One of numpy's has no such dict: another
object takes each of its places. A method that was bound before is a place of its own (``draw = rng.random``).
"""

from __future__ import annotations

import gc
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.pystate.layout import instance_dict
from hocket.pystate.places import ABSENT, Group, Place, is_a
from hocket.pystate.tokens import DRAWING, OF_NUMPY
from hocket.pystate.walk import Reachable

_NUMPY = (np.random.Generator, np.random.RandomState)
_METHODS = (types.MethodType, types.BuiltinFunctionType)
# Functions of its module that ask it and are no methods.
_FUNCTIONS = [vars(np.random)[name] for name in ("seed", "sample", "ranf", "get_bit_generator", "set_bit_generator")]
# Attributes by which the state of a generator of numpy's is read, set, or copied.
_OF_STATE = frozenset(("bit_generator", "__reduce_ex__", "__reduce__", "__getstate__"))
_OWN = 2  # references to an object that a function has, as `sys.getrefcount` counts
_WRITABLE = frozenset(("dict", "cell", "list", "slots"))  # what stands in a class may be bound when it is read


@dataclass(frozen=True, eq=False)
class GeneratorPlace:
    """A place of a method of a generator, or of a generator."""

    place: Place  # where it stands
    value: Any  # what stands there
    method: Callable[..., Any] | None = None  # of the generator. None for the generator itself.
    is_reached: bool = False  # the step was seen to reach it: something else may be put there

    @property
    def holds(self) -> bool:
        """True if nothing else was put there."""
        return self.place.get() is self.value

    def made(self, asked: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """The object that takes this place, whose draws are those of `asked`."""
        if self.method is not None:
            return asked(self.method)
        generator: Any = self.value
        if not is_a(generator, _NUMPY):
            return generator
        kind: Any = type(generator)
        names = [name for name in dir(kind) if not name.startswith("_")]
        methods = {name: asked(one) for name in names if callable(one := getattr(generator, name))}

        def get_state() -> None:
            """Stands for what reads or sets the state otherwise."""

        class Asking(kind):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                if name in methods:
                    return methods[name]
                if name not in _OF_STATE:
                    return super().__getattribute__(name)
                asked(get_state)()
                return getattr(generator, name)

        is_new = is_a(generator, np.random.Generator)
        return Asking(generator.bit_generator if is_new else generator._bit_generator)


@contextmanager
def exchanged(
    places: Iterable[GeneratorPlace], asked: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let other objects stand at these places, whose draws are those of `asked`. One object has one that stands for it.

    Where else the step has put such an object meanwhile, its original takes its place at the end.
    """
    known: dict[Any, Any] = {}
    originals: dict[int, Any] = {}
    for each in places:
        one = known.get(key := each.place.identity if each.value is ABSENT else id(each.value))
        if one is None:
            one = known[key] = each.made(asked)
            originals[id(one)] = each.value
        each.place.set(one)
        if each.value is ABSENT:
            originals[id(one)] = each.method
    try:
        yield
    finally:
        for each in places:
            if (current := each.place.get()) is not ABSENT and id(current) in originals:
                each.place.set(ABSENT if each.value is ABSENT else originals[id(current)])
        current = None  # it may be one of them
        while known:
            one = known.popitem()[1]
            if sys.getrefcount(one) > _OWN and (original := originals[id(one)]) is not one:
                _give_back(one, original)


def _give_back(one: Any, original: Any) -> None:
    """Put the original where an object is kept that stood for it."""
    for holder in gc.get_referrers(one):
        if type(holder) is types.CellType:
            holder.cell_contents = original
            continue
        table = holder if type(holder) in (dict, list) else instance_dict(holder)
        for key, value in list(enumerate(table) if type(table) is list else (table or {}).items()):
            if value is one:
                table[key] = original  # type: ignore[index]


def generator_places(generators: Iterable[Any], found: Reachable, tells_types: bool) -> list[GeneratorPlace] | None:
    """The places of these generators and of their methods. None if one is held where nothing else can be put.

    Args:
        generators: of `random` and numpy.
        found: what the step reaches.
        tells_types: the step compares types, and could tell what stands for a generator of numpy's.
    """
    known = {id(each): each for each in generators}
    if not all(type(each) in (random.Random, *_NUMPY) for each in known.values()):
        return None  # a class of the user's may draw otherwise
    made: dict[Any, GeneratorPlace] = {}
    held = {id(each) for each in known.values() if not is_a(each, _NUMPY)}
    groups = [(each, True) for each in found.groups.values()]
    groups += [(_as_group(module), False) for module in (random, np.random)]
    for group, is_reached in groups:
        for position, value in enumerate(group.values):
            generator = _asked_by(value)
            if id(generator) not in known:
                continue
            is_method = generator is not value
            if tells_types and not is_method and is_a(value, _NUMPY) and is_reached:
                return None
            if group.kind in _WRITABLE:
                held.add(id(generator))
                one = GeneratorPlace(group.place(position), value, value if is_method else None, is_reached)
                made.setdefault(one.place.identity, one)
            elif is_method or is_a(value, _NUMPY):
                return None
    for generator in known.values():
        if is_a(generator, random.Random):
            for name in dir(random.Random):
                method, place = getattr(generator, name), Place("dict", vars(generator), name, (None, "", name))
                if not name.startswith("_") and type(method) in _METHODS:
                    made.setdefault(place.identity, GeneratorPlace(place, ABSENT, method))
    if held != set(known) or not all(each.holds for each in made.values()):
        return None
    return list(made.values())


def _asked_by(value: Any) -> Any:
    """The generator that a function asks, or the value itself if it is one. None for any other value."""
    if type(value) in _METHODS:
        return value.__self__
    if is_a(value, DRAWING):
        return value
    return OF_NUMPY if any(value is each for each in _FUNCTIONS) else None


def _as_group(module: types.ModuleType) -> Group:
    table = vars(module)
    return Group("dict", table, (None, "", module.__name__), list(table), list(table.values()), ".")
