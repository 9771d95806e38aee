"""Places that hold whole numbers only: lengths, positions, limits, state of objects of C."""

from __future__ import annotations

import array
import codecs
import collections
import configparser
import csv
import ctypes
import decimal
import fractions
import functools
import gc
import hashlib
import io
import itertools
import logging
import mmap
import multiprocessing.shared_memory
import operator
import os
import re
import sqlite3
import struct
import sys
import tempfile
import threading
import uuid
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loops.holders.objects import attribute, item_of
from loops.holders.registry import KEPT, NUMBERS, Made, number


def _numbered(container: Callable[[], Any]) -> Callable[[Any], Made]:
    return item_of(container, 0)


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
    NUMBERS[_name] = attribute(_owner)


class Total(int):
    """A number of a class of its own."""


def _made(make: Callable[[int], Any], read: Callable[[Any], int] = int) -> Callable[[Any], Made]:
    """An item of a list, made anew of each number."""

    def of(first: Any) -> Made:
        held = [make(first)]

        def write(value: int) -> None:
            held[0] = make(value)

        return lambda: read(held[0]), write

    return of


def _growing(make: Callable[[int], Any], grow: Callable[[Any], Any]) -> Callable[[Any], Made]:
    """The length of a container that grows by one."""

    def of(first: Any) -> Made:
        held = make(first)
        return lambda: len(held), lambda value: grow(held)

    return of


def _position(stream: Callable[[], Any]) -> Callable[[Any], Made]:
    def of(first: Any) -> Made:
        held = stream()
        held.seek(first)
        return held.tell, held.seek

    return of


NUMBERS |= {
    "state_of_numbers_of_its_own": _made(Total),
    "identifier": _made(lambda value: uuid.UUID(int=value), lambda held: held.int),
    "fraction": _made(fractions.Fraction),
    "text": _made(str),
    "length_of_a_list": _growing(lambda first: [None] * first, lambda held: held.append(None)),
    "length_of_a_set": _growing(lambda first: set(range(first)), lambda held: held.add(len(held))),
    "length_of_a_dict": _growing(lambda first: dict.fromkeys(range(first)), lambda held: held.setdefault(len(held))),
    "length_of_an_array": _growing(lambda first: array.array("b", bytes(first)), lambda held: held.append(0)),
    "position_in_a_raw_stream": _position(lambda: io.BytesIO(bytes(100_000))),
    "position_in_a_text_stream": _position(lambda: io.StringIO(" " * 100_000)),
}


@number
def shared_memory(first):
    held = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    KEPT.append(held)
    weakref.finalize(held, held.unlink)
    held.buf[0] = first
    return lambda: held.buf[0], functools.partial(operator.setitem, held.buf, 0)


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
    lengths = [first]

    def write(value):
        held.compress(b"x")
        lengths[0] = value

    return lambda: lengths[0], write


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
