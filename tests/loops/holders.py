"""Places in which Python programs keep state: each holds one value, which a step reads and writes.

A holder is made anew for each run: ``make(first)`` returns two functions, one that reads the value and one that puts
another one there, as user code would. `NUMBERS` hold whole numbers only.
"""

from __future__ import annotations

import abc
import argparse
import array
import asyncio
import builtins
import codecs
import collections
import configparser
import contextvars
import copy
import csv
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import gc
import graphlib
import hashlib
import heapq
import io
import itertools
import json
import logging
import math
import mmap
import multiprocessing.shared_memory
import operator
import os
import pickle
import queue
import random
import re
import sqlite3
import string
import struct
import sys
import tempfile
import threading
import types
import uuid
import warnings
import weakref
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Made = tuple[Callable[[], Any], Callable[[Any], None]]
HOLDERS: dict[str, Callable[[Any], Made]] = {}
NUMBERS: dict[str, Callable[[Any], Made]] = {}
KEPT: list[Any] = []  # what has to outlive a loop


def holder(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    HOLDERS[make.__name__] = make
    return make


def number(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    NUMBERS[make.__name__] = make
    return make


def _attribute(owner: Any) -> Callable[[Any], Made]:
    """The attribute `value` of the object that `owner()` makes."""

    def make(first: Any) -> Made:
        held = owner()
        held.kept = first

        def read() -> Any:
            return held.kept

        def write(value: Any) -> None:
            held.kept = value

        return read, write

    return make


class Numbers(list):
    pass


class Table(dict):
    pass


class Pair(tuple):
    pass


class Members(set):
    pass


class Text(str):
    pass


class Whole(int):
    pass


class Ring(collections.deque):
    pass


class Raw(bytearray):
    pass


class Array(np.ndarray):
    pass


class Draws(random.Random):
    pass


class Local(threading.local):
    pass


class Meta(type):
    pass


class WithMeta(metaclass=Meta):
    pass


class Plain:
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
    kept: Any = None


class Layer(torch.nn.Module):
    pass


class Warned(UserWarning):
    pass


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
    "field": Record,
    "field in a slot": SlotRecord,
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
    HOLDERS[_name] = _attribute(_owner)


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


def _item(container: Callable[[], Any], key: Any) -> Callable[[Any], Made]:
    def make(first: Any) -> Made:
        held = container()
        held[key] = first

        def write(value: Any) -> None:
            held[key] = value

        return (lambda: held[key]), write

    return make


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
    HOLDERS[_name] = _item(_container, _key)


@holder
def defaults(first):
    def held(value=first):
        return value

    def write(value):
        held.__defaults__ = (value,)

    return held, write


@holder
def keyword_defaults(first):
    def held(*, value=first):
        return value

    def write(value):
        held.__kwdefaults__["value"] = value

    return held, write


@holder
def item_of_a_default(first):
    def held(value=[first]):  # noqa: B006  # that is the point
        return value

    def write(value):
        held()[0] = value

    return lambda: held()[0], write


@holder
def bound_method(first):
    held = Plain()
    held.value = first
    method = types.MethodType(lambda self: self, held)

    def write(value):
        method().value = value

    return lambda: method().value, write


@holder
def partials_argument(first):
    held = functools.partial(operator.getitem, [first], 0)

    def write(value):
        held.args[0][0] = value

    return held, write


@holder
def partials_keyword(first):
    held = functools.partial(dict, value=first)

    def write(value):
        held.keywords["value"] = value

    return lambda: held()["value"], write


@holder
def partials_state(first):
    held = functools.partial(operator.getitem, [first], 0)

    def write(value):
        held.__setstate__((operator.getitem, ([value], 0), {}, {}))

    return held, write


@holder
def arguments_of_an_exception(first):
    held = ValueError(first)

    def write(value):
        held.args = (value,)

    return lambda: held.args[0], write


@holder
def cause_of_an_exception(first):
    held = ValueError()
    held.__cause__ = KeyError(first)

    def write(value):
        held.__cause__ = KeyError(value)

    return lambda: held.__cause__.args[0], write


@holder
def context_variable(first):
    held = contextvars.ContextVar("held")
    KEPT.append(held)
    held.set(first)
    return held.get, held.set


@holder
def context(first):
    held, variable = contextvars.copy_context(), contextvars.ContextVar("held")
    held.run(variable.set, first)
    return lambda: held[variable], lambda value: held.run(variable.set, value)


@holder
def mapping_proxy(first):
    table = {"n": first}
    held = types.MappingProxyType(table)
    return lambda: held["n"], functools.partial(operator.setitem, table, "n")


@holder
def descriptor(first):
    class Kept:
        def __init__(self):
            self.table = weakref.WeakKeyDictionary()

        def __get__(self, owner, kind):
            return self.table[owner]

        def __set__(self, owner, value):
            self.table[owner] = value

    class Owner:
        value = Kept()

    return _attribute(Owner)(first)


@holder
def property_of_a_list(first):
    values = [first]

    class Owner:
        @property
        def value(self):
            return values[-1]

        @value.setter
        def value(self, new):
            values.append(new)

    return _attribute(Owner)(first)


@holder
def dynamic_attribute(first):
    class Owner:
        def __init__(self):
            object.__setattr__(self, "table", {})

        def __getattr__(self, name):
            return self.table[name]

        def __setattr__(self, name, value):
            self.table[name] = value

    return _attribute(Owner)(first)


@holder
def simple_queue(first):
    held = queue.SimpleQueue()
    held.put(first)

    def read():
        value = held.get()
        held.put(value)
        return value

    def write(value):
        held.get()
        held.put(value)

    return read, write


@holder
def waiting_queue(first):
    held = queue.Queue()
    held.put(first)

    def read():
        value = held.get()
        held.put(value)
        return value

    def write(value):
        held.get()
        held.put(value)

    return read, write


@holder
def priority_queue(first):
    held = [(0, first)]

    def write(value):
        heapq.heapreplace(held, (0, value)) if isinstance(value, int) else held.__setitem__(0, (0, value))

    return lambda: held[0][1], write


@holder
def generator(first):
    def run():
        value = first
        while True:
            new = yield value
            if new is not None:
                value = new

    held = run()
    next(held)
    return lambda: held.send(None), held.send


@holder
def coroutine(first):
    class Wait:
        def __await__(self):
            return (yield)

    async def run():
        value = first
        while True:
            box = await Wait()
            if box[0] is None:
                box[0] = value
            else:
                value = box[0]

    held = run()
    held.send(None)
    KEPT.append(held)

    def read():
        box = [None]
        held.send(box)
        return box[0]

    return read, lambda value: held.send([value])


@holder
def future(first):
    held = [asyncio.Future(loop=asyncio.new_event_loop())]
    KEPT.append(held[0].get_loop())
    held[0].set_result(first)

    def write(value):
        new = asyncio.Future(loop=held[0].get_loop())
        new.set_result(value)
        held[0] = new

    return lambda: held[0].result(), write


@holder
def referent_of_a_weak_reference(first):
    owner = Plain()
    owner.value = first
    KEPT.append(owner)
    held = weakref.ref(owner)

    def write(value):
        held().value = value

    return lambda: held().value, write


@holder
def weak_proxy(first):
    owner = Plain()
    owner.value = first
    KEPT.append(owner)
    held = weakref.proxy(owner)

    def write(value):
        held.value = value

    return lambda: held.value, write


@holder
def element_of_xml(first):
    held = ElementTree.Element("held")
    held.attrib["value"] = first
    return lambda: held.get("value"), functools.partial(held.set, "value")


@holder
def text_of_xml(first):
    held = ElementTree.Element("held")
    held.text = first

    def write(value):
        held.text = value

    return lambda: held.text, write


@holder
def module_table(first):
    sys.modules["a_module_that_holds"] = types.SimpleNamespace(value=first)

    def write(value):
        sys.modules["a_module_that_holds"].value = value

    return lambda: sys.modules["a_module_that_holds"].value, write


@holder
def referents(first):
    """Found by the collector, and by no name."""
    held = (Record(first),)

    def find():
        return next(each for each in gc.get_referents(held) if isinstance(each, Record))

    def write(value):
        find().value = value

    return lambda: find().value, write


@holder
def copied(first):
    held = Record(first)

    def write(value):
        new = copy.copy(held)
        new.value = value
        held.__dict__.update(vars(new))

    return lambda: held.value, write


@holder
def named_by_computing(first):
    held = Plain()
    setattr(held, "val" + "ue", first)
    return lambda: getattr(held, "v" + "alue"), lambda value: setattr(held, "valu" + "e", value)


@holder
def callback_of_a_finalizer(first):
    owner, table = Plain(), [first]
    KEPT.append(owner)
    held = weakref.finalize(owner, table.append, None)

    def read():
        return held.peek()[1].__self__[0]

    def write(value):
        held.peek()[1].__self__[0] = value

    return read, write


@holder
def registry_of_dispatch(first):
    @functools.singledispatch
    def held(value):
        return None

    held.register(int, lambda _: first)

    def write(value):
        held.register(int, lambda _: value)

    return lambda: held.dispatch(int)(0), write


# ------------------------------------------------------------------------------------------------ whole numbers only


def _numbered(container: Callable[[], Any]) -> Callable[[Any], Made]:
    return _item(container, 0)


class Struct(ctypes.Structure):
    _fields_ = [("value", ctypes.c_long)]


for _name, _container in {
    "array": lambda: array.array("q", [0, 0]),
    "bytearray": lambda: bytearray(8),
    "memory view": lambda: memoryview(bytearray(8)),
    "memory view of an array": lambda: memoryview(array.array("q", [0, 0])),
    "array of numpy": lambda: np.zeros(3, dtype=np.int64),
    "array of numpy, of no axes": lambda: np.zeros((1,), dtype=np.int64)[:1],
    "array of ctypes": lambda: (ctypes.c_long * 4)(),
    "pointer": lambda: ctypes.pointer(ctypes.c_long(0)),
    "mapped memory": lambda: mmap.mmap(-1, 16),
    "tensor": lambda: torch.zeros(3, dtype=torch.int64),
}.items():
    NUMBERS[_name] = _numbered(_container)
for _name, _owner in {
    "number of ctypes": lambda: ctypes.c_long(0),
    "structure of ctypes": Struct,
}.items():
    NUMBERS[_name] = _attribute(_owner)


@number
def shared_memory(first):
    held = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    KEPT.append(held)
    weakref.finalize(held, held.unlink)
    held.buf[0] = first
    return lambda: held.buf[0], functools.partial(operator.setitem, held.buf, 0)


@number
def position_in_a_raw_stream(first):
    held = io.BytesIO(bytes(100_000))
    held.seek(first)
    return held.tell, held.seek


@number
def position_in_a_text_stream(first):
    held = io.StringIO(" " * 100_000)
    held.seek(first)
    return held.tell, held.seek


@number
def position_in_a_file(first):
    held = tempfile.TemporaryFile()  # noqa: SIM115  # it stays open as long as the loop runs
    KEPT.append(held)
    held.seek(first)
    return held.tell, held.seek


@number
def length_of_a_raw_stream(first):
    held = io.BytesIO(bytes(first))

    def write(value):
        held.truncate(0)
        held.seek(0)
        held.write(bytes(value))

    return lambda: len(held.getvalue()), write


@number
def length_of_a_list(first):
    held = [None] * first
    return lambda: len(held), lambda value: held.append(None)


@number
def length_of_a_set(first):
    held = set(range(first))
    return lambda: len(held), lambda value: held.add(len(held))


@number
def length_of_a_dict(first):
    held = dict.fromkeys(range(first))
    return lambda: len(held), lambda value: held.setdefault(len(held))


@number
def order_of_a_dict(first):
    held = collections.OrderedDict.fromkeys(range(1000))
    for _ in range(first):
        held.move_to_end(next(iter(held)))
    return lambda: next(iter(held)), lambda value: held.move_to_end(next(iter(held)))


@number
def rotation_of_a_deque(first):
    held = collections.deque(range(1000))
    held.rotate(-first)
    return lambda: held[0], lambda value: held.rotate(-1)


@number
def length_of_an_array(first):
    held = array.array("b", bytes(first))
    return lambda: len(held), lambda value: held.append(0)


@number
def recursion_limit(first):
    base = sys.getrecursionlimit()
    sys.setrecursionlimit(base + first)
    return lambda: sys.getrecursionlimit() - base, lambda value: sys.setrecursionlimit(base + value)


@number
def threshold_of_the_collector(first):
    base = gc.get_threshold()
    gc.set_threshold(base[0], base[1], first)
    return lambda: gc.get_threshold()[2], lambda value: gc.set_threshold(*base[:2], value)


@number
def precision_of_decimals(first):
    decimal.getcontext().prec = first + 100

    def write(value):
        decimal.getcontext().prec = value + 100

    return lambda: decimal.getcontext().prec - 100, write


@number
def environment(first):
    os.environ["HELD_BY_A_LOOP"] = str(first)

    def write(value):
        os.environ["HELD_BY_A_LOOP"] = str(value)

    return lambda: int(os.environ["HELD_BY_A_LOOP"]), write


@number
def level_of_a_logger(first):
    held = logging.getLogger("holders.level")
    held.setLevel(first + 1)
    return lambda: held.level - 1, lambda value: held.setLevel(value + 1)


@number
def semaphore(first):
    held = threading.Semaphore(first)

    def read():
        taken = 0
        while held.acquire(blocking=False):
            taken += 1
        for _ in range(taken):
            held.release()
        return taken

    return read, lambda value: held.release()


@number
def database(first):
    held = sqlite3.connect(":memory:")
    KEPT.append(held)
    held.execute("create table held (value integer)")
    held.execute("insert into held values (?)", (first,))

    def write(value):
        held.execute("update held set value = ?", (value,))

    return lambda: held.execute("select value from held").fetchone()[0], write


@number
def hash_that_grows(first):
    held = hashlib.sha256()
    known = {}
    probe = hashlib.sha256()
    for count in range(1000):
        known[probe.digest()] = count
        probe.update(b"x")
    for _ in range(first):
        held.update(b"x")
    return lambda: known[held.digest()], lambda value: held.update(b"x")


@number
def decompressor(first):
    held = zlib.compressobj()
    for _ in range(first):
        held.compress(b"x")

    def read():
        return len(zlib.decompress(held.copy().flush(), wbits=0)) if False else lengths[0]

    lengths = [first]

    def write(value):
        held.compress(b"x")
        lengths[0] = value

    return read, write


@number
def writer_of_lines(first):
    text = io.StringIO("\n" * first)
    text.seek(0, io.SEEK_END)
    held = csv.writer(text)
    return lambda: len(text.getvalue().splitlines()), lambda value: held.writerow([])


@number
def incremental_decoder(first):
    held = codecs.getincrementaldecoder("utf-8")()
    held.setstate((b"", first))
    count = [first]

    def write(value):
        held.setstate((b"", value))
        count[0] = value

    return lambda: count[0], write


@number
def parsed_configuration(first):
    held = configparser.ConfigParser()
    held["held"] = {"value": str(first)}

    def write(value):
        held["held"]["value"] = str(value)

    return lambda: held.getint("held", "value"), write


@number
def cache_of_a_function(first):
    @functools.lru_cache
    def held(value):
        return value

    for value in range(first):
        held(-value)
    return lambda: held.cache_info().currsize, lambda value: held(1000 + value)


@number
def cached_property_of_an_object(first):
    class Owner:
        @functools.cached_property
        def value(self):
            return first

    held = Owner()

    def write(value):
        del held.value
        held.__dict__["value"] = value

    return lambda: held.value, lambda value: (held.value, write(value))[1]


@number
def state_of_numbers_of_its_own(first):
    class Total(int):
        pass

    held = [Total(first)]

    def write(value):
        held[0] = Total(value)

    return lambda: int(held[0]), write


@number
def identifier(first):
    held = [uuid.UUID(int=first)]

    def write(value):
        held[0] = uuid.UUID(int=value)

    return lambda: held[0].int, write


@number
def fraction(first):
    held = [fractions.Fraction(first)]

    def write(value):
        held[0] = fractions.Fraction(value)

    return lambda: int(held[0]), write


@number
def text(first):
    held = [str(first)]

    def write(value):
        held[0] = str(value)

    return lambda: int(held[0]), write


@number
def packed_bytes(first):
    held = bytearray(struct.pack("q", first))
    return lambda: struct.unpack_from("q", held)[0], lambda value: struct.pack_into("q", held, 0, value)


@number
def pattern_of_a_scanner(first):
    held = re.compile("x").scanner("x" * 1000)
    count = [first]
    for _ in range(first):
        held.search()

    def write(value):
        held.search()
        count[0] = value

    return lambda: count[0], write


@number
def iterator_of_numbers(first):
    held = [itertools.count(first)]

    def read():
        value = next(held[0])
        held[0] = itertools.chain([value], held[0])
        return value

    return read, lambda value: next(held[0])


@number
def state_of_the_optimizer(first):
    parameter = torch.nn.Parameter(torch.zeros(2))
    held = torch.optim.SGD([parameter], lr=0.1)
    held.state[parameter]["n"] = first

    def write(value):
        held.state[parameter]["n"] = value

    return lambda: held.state[parameter]["n"], write


@number
def group_of_an_optimizer(first):
    held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    held.param_groups[0]["n"] = first

    def write(value):
        held.param_groups[0]["n"] = value

    return lambda: held.param_groups[0]["n"], write


@number
def buffer_of_a_layer(first):
    held = Layer()
    held.register_buffer("n", torch.tensor(first))

    def write(value):
        held.n.fill_(value)

    return lambda: int(held.n), write


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
