"""Attributes and items of objects of many kinds."""

from __future__ import annotations

import abc
import argparse
import builtins
import collections
import dataclasses
import enum
import fractions
import functools
import graphlib
import io
import json
import logging
import math
import pickle
import queue
import random
import string
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loops.holders.registry import HOLDERS, NUMBERS, Made, holder, number, place, reached


def attribute(owner: Any) -> Callable[[Any], Made]:
    """The attribute `kept` of the object that `owner()` makes."""

    def make(first: Any) -> Any:
        held = owner()
        held.kept = first
        return held

    def write(held: Any, value: Any) -> None:
        held.kept = value

    return place(make, lambda held: held.kept, write)


# Classes of their own, of which instances take attributes that those of their bases do not.
Numbers, Table, Pair, Members, Text, Whole, Ring, Raw, Array, Draws, Local, Meta, Plain, Layer, Warned = (
    type(name, (base,), {})
    for name, base in {
        **{"Numbers": list, "Table": dict, "Pair": tuple, "Members": set, "Text": str, "Whole": int},
        **{"Ring": collections.deque, "Raw": bytearray, "Array": np.ndarray, "Draws": random.Random},
        **{"Local": threading.local, "Meta": type, "Plain": object, "Layer": torch.nn.Module, "Warned": UserWarning},
    }.items()
)


class WithMeta(metaclass=Meta):
    pass


class Looked(Plain):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class Hidden(Plain):
    @property
    def __dict__(self):
        return {}


class Slots:
    __slots__ = ("kept", "value")


class SlotsBelow(Slots):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    value: Any = None


@dataclasses.dataclass(slots=True)
class SlotRecord:
    value: Any = None


for _name, _owner in {
    "namespace": types.SimpleNamespace,
    "parsed arguments": argparse.Namespace,
    "attribute of a list": Numbers,
    "attribute of a dict": Table,
    "attribute of a tuple": Pair,
    "attribute of a set": Members,
    "attribute of a text": lambda: Text("a"),
    "attribute of a whole number": lambda: Whole(3),
    "attribute of a deque": Ring,
    "attribute of a bytearray": Raw,
    "attribute of an array": lambda: np.zeros(3).view(Array),
    "attribute of a random generator": Draws,
    "attribute of a partial": lambda: functools.partial(print),
    "attribute of an exception": ValueError,
    "attribute of a warning": Warned,
    "attribute of a function": lambda: lambda: None,
    "attribute of a cached function": lambda: functools.lru_cache(lambda: None),
    "attribute of a static method": lambda: staticmethod(len),
    "attribute of a tensor": lambda: torch.zeros(3),
    "attribute of a parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "attribute of a module": lambda: types.ModuleType("made"),
    "attribute of a layer of torch's": lambda: torch.nn.Linear(2, 2),
    "attribute of a layer": Layer,
    "attribute of a module list": lambda: torch.nn.ModuleList(),
    "attribute of an optimizer": lambda: torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1),
    "attribute of a scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), 3
    ),
    "attribute of a data set": lambda: torch.utils.data.TensorDataset(torch.zeros(2)),
    "attribute of a loader": lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2))),
    "attribute of a distribution": lambda: torch.distributions.Normal(0.0, 1.0),
    "attribute of an object": Plain,
    "attribute behind __getattribute__": Looked,
    "attribute behind a __dict__ of its own": Hidden,
    "slot": Slots,
    "slot of a base": SlotsBelow,
    "attribute of an enum": lambda: Colour.RED,
    "attribute of a class": lambda: type("Made", (), {}),
    "attribute of a class with a metaclass": lambda: WithMeta,
    "attribute of a metaclass": lambda: Meta,
    "attribute of an abstract class": lambda: abc.ABCMeta("Made", (), {}),
    "attribute of a class of torch's": lambda: torch.nn.Linear,
    "attribute of a class of Python's": lambda: fractions.Fraction,
    "attribute of a module of Python's": lambda: math,
    "attribute of a module of torch's": lambda: torch.nn.functional,
    "attribute of torch": lambda: torch,
    "attribute of numpy": lambda: np,
    "attribute of builtins": lambda: builtins,
    "attribute of sys": lambda: sys,
    "thread-local": threading.local,
    "thread-local of a class": Local,
    "attribute of a thread": threading.Thread,
    "attribute of a logger": lambda: logging.getLogger("holders"),
    "attribute of a handler": logging.NullHandler,
    "attribute of a text stream": io.StringIO,
    "attribute of a raw stream": io.BytesIO,
    "attribute of a JSON encoder": json.JSONEncoder,
    "attribute of a pickler": lambda: pickle._Pickler(io.BytesIO()),
    "attribute of a context manager": lambda: warnings.catch_warnings(),
    "attribute of a template": lambda: string.Template("a"),
    "attribute of a sorter": graphlib.TopologicalSorter,
    "attribute of a weak dictionary": weakref.WeakKeyDictionary,
    "attribute of a queue": queue.Queue,
    "attribute of an event": threading.Event,
    "attribute of a user list": collections.UserList,
    "attribute of a chain of maps": collections.ChainMap,
}.items():
    HOLDERS[_name] = attribute(_owner)
HOLDERS |= {"field": reached(Record), "field in a slot": reached(SlotRecord)}


@holder
def cell(first):
    held = first

    def read():
        return held

    def write(value):
        nonlocal held
        held = value

    return read, write


@holder
def made_cell(first):
    held = types.CellType(first)

    def write(value):
        held.cell_contents = value

    return lambda: held.cell_contents, write


def item_of(container: Callable[[], Any], key: Any) -> Callable[[Any], Made]:
    def make(first: Any) -> Any:
        held = container()
        held[key] = first
        return held

    def write(held: Any, value: Any) -> None:
        held[key] = value

    return place(make, lambda held: held[key], write)


class Inner:
    def __init__(self, table):
        self._table = table

    def __getitem__(self, key):
        return self._table[key]

    def __setitem__(self, key, value):
        self._table[key] = value


for _name, _container, _key in (
    ("item of a list", lambda: [None], 0),
    ("item of a dict", dict, "n"),
    ("item by a tuple", dict, ("n", 1)),
    ("item of a default dict", lambda: collections.defaultdict(int), "n"),
    ("item of an ordered dict", collections.OrderedDict, "n"),
    ("item of a counter", collections.Counter, "n"),
    ("item of a chain of maps", collections.ChainMap, "n"),
    ("item of a user dict", collections.UserDict, "n"),
    ("item of a user list", lambda: collections.UserList([None]), 0),
    ("item of a deque", lambda: collections.deque([None]), 0),
    ("item of a ring", lambda: Ring([None]), 0),
    ("item of a list of its own", lambda: Numbers([None]), 0),
    ("item of a dict of its own", Table, "n"),
    ("item of an array of objects", lambda: np.array([None, None], dtype=object), 1),
    ("item of a weak dictionary", lambda: weakref.WeakKeyDictionary(), Plain()),
    ("item of a vars", lambda: vars(Plain()), "n"),
    ("item of globals", globals, "_held_in_globals"),
    ("item of an inner dict", lambda: Inner({}), "n"),
    ("item of a shelf of lists", lambda: Inner([[None]])[0], 0),
):
    HOLDERS[_name] = item_of(_container, _key)


def _state_of_an_optimizer() -> Any:
    parameter = torch.nn.Parameter(torch.zeros(2))
    return torch.optim.SGD([parameter], lr=0.1).state[parameter]


NUMBERS |= {
    "state_of_the_optimizer": item_of(_state_of_an_optimizer, "n"),
    "group_of_an_optimizer": item_of(
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).param_groups[0], "n"
    ),
}


@number
def buffer_of_a_layer(first):
    held = Layer()
    held.register_buffer("n", torch.tensor(first))
    return lambda: int(held.n), lambda value: held.n.fill_(value)


@number
def extra_state(first):
    class Kept(torch.nn.Module):
        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    held = Kept()
    held.set_extra_state(first)
    return held.get_extra_state, held.set_extra_state
