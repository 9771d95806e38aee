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

from loops.holders.objects import item_of
from loops.holders.registry import NUMBERS, Made, kept, number, place, reached


class Struct(ctypes.Structure):
    _fields_ = [("value", ctypes.c_long)]


class Total(int):
    """A number of a class of its own."""


class CachedOnce:
    first = 0

    @functools.cached_property
    def value(self):
        return self.first


def _made(make: Callable[[int], Any], read: Callable[[Any], int] = int) -> Callable[[Any], Made]:
    """An item of a list, made anew of each number."""
    return place(
        lambda first: [make(first)], lambda held: read(held[0]), lambda held, value: held.__setitem__(0, make(value))
    )


def _steps(
    make: Callable[[int], Any], read: Callable[[Any], int], advance: Callable[[Any], Any]
) -> Callable[[Any], Made]:
    """A count that goes up by one, whatever is written: a length, a rotation, an object of C that only goes on."""
    return place(make, read, lambda held, value: advance(held))


def _position(stream: Callable[[], Any]) -> Callable[[Any], Made]:
    def of(first: Any) -> Made:
        held = kept(stream())
        held.seek(first)
        return held.tell, held.seek

    return of


def _advanced(make: Callable[[], Any], advance: Callable[[Any], Any]) -> Callable[[Any], Made]:
    """An object of C that tells nothing of itself, beside a list that counts how often it has gone on."""

    def made(first: int) -> tuple[Any, list[int]]:
        held = make()
        for _ in range(first):
            advance(held)
        return held, [first]

    def write(held: tuple[Any, list[int]], value: int) -> None:
        advance(held[0])
        held[1][0] = value

    return place(made, lambda held: held[1][0], write)


def _global(read: Callable[[], int], write: Callable[[int], Any], base: int = 0) -> Callable[[Any], Made]:
    """A setting of the process, above a number that it may be."""

    def of(first: Any) -> Made:
        write(base + first)
        return lambda: read() - base, lambda value: write(base + value)

    return of


def _moved(held: Any, move: Callable[[Any], Any], count: int) -> Any:
    for _ in range(count):
        move(held)
    return held


def _rewrite(held: io.BytesIO, value: int) -> None:
    held.truncate(0)
    held.seek(0)
    held.write(bytes(value))


def _to_the_end(held: collections.OrderedDict[int, None]) -> None:
    held.move_to_end(next(iter(held)))


def _number_of(held: threading.Semaphore) -> int:
    taken = 0
    while held.acquire(blocking=False):
        taken += 1
    for _ in range(taken):
        held.release()
    return taken


def _set_precision(value: int) -> None:
    decimal.getcontext().prec = value


def _configured(first: int) -> configparser.ConfigParser:
    held = configparser.ConfigParser()
    held["held"] = {"value": str(first)}
    return held


def _cached(first: int) -> Any:
    held = functools.lru_cache(lambda value: value)
    for value in range(first):
        held(-value)
    return held


def _lines(first: int) -> tuple[io.StringIO, Any]:
    text = io.StringIO("\n" * first)
    text.seek(0, io.SEEK_END)
    return text, csv.writer(text)


NUMBERS |= {
    **{
        name: item_of(container, 0)
        for name, container in {
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
        }.items()
    },
    "number of ctypes": reached(ctypes.c_long),
    "structure of ctypes": reached(Struct),
    "state_of_numbers_of_its_own": _made(Total),
    "identifier": _made(lambda value: uuid.UUID(int=value), lambda held: held.int),
    "fraction": _made(fractions.Fraction),
    "text": _made(str),
    "length_of_a_list": _steps(lambda first: [None] * first, len, lambda held: held.append(None)),
    "length_of_a_set": _steps(lambda first: set(range(first)), len, lambda held: held.add(len(held))),
    "length_of_a_dict": _steps(lambda first: dict.fromkeys(range(first)), len, lambda held: held.setdefault(len(held))),
    "length_of_an_array": _steps(lambda first: array.array("b", bytes(first)), len, lambda held: held.append(0)),
    "position_in_a_raw_stream": _position(lambda: io.BytesIO(bytes(100_000))),
    "position_in_a_text_stream": _position(lambda: io.StringIO(" " * 100_000)),
    "position_in_a_file": _position(tempfile.TemporaryFile),
    "length_of_a_raw_stream": place(
        lambda first: io.BytesIO(bytes(first)), lambda held: len(held.getvalue()), _rewrite
    ),
    "order_of_a_dict": _steps(
        lambda first: _moved(collections.OrderedDict.fromkeys(range(1000)), _to_the_end, first),
        lambda held: next(iter(held)),
        _to_the_end,
    ),
    "rotation_of_a_deque": _steps(
        lambda first: _moved(collections.deque(range(1000)), lambda held: held.rotate(-1), first),
        lambda held: held[0],
        lambda held: held.rotate(-1),
    ),
    "recursion_limit": _global(sys.getrecursionlimit, sys.setrecursionlimit, sys.getrecursionlimit()),
    "threshold_of_the_collector": _global(
        lambda: gc.get_threshold()[2], lambda value: gc.set_threshold(*gc.get_threshold()[:2], value)
    ),
    "precision_of_decimals": _global(lambda: decimal.getcontext().prec, _set_precision, 100),
    "environment": _global(
        lambda: int(os.environ["HELD_BY_A_LOOP"]), lambda value: os.environ.update(HELD_BY_A_LOOP=str(value))
    ),
    "level_of_a_logger": _global(
        lambda: logging.getLogger("holders.level").level, logging.getLogger("holders.level").setLevel, 1
    ),
    "semaphore": _steps(threading.Semaphore, _number_of, lambda held: held.release()),
    "hash_that_grows": _advanced(hashlib.sha256, lambda held: held.update(b"x")),
    "decompressor": _advanced(zlib.compressobj, lambda held: held.compress(b"x")),
    "pattern_of_a_scanner": _advanced(lambda: re.compile("x").scanner("x" * 1000), lambda held: held.search()),
    "writer_of_lines": _steps(
        _lines, lambda held: len(held[0].getvalue().splitlines()), lambda held: held[1].writerow([])
    ),
    "parsed_configuration": place(
        _configured,
        lambda held: held.getint("held", "value"),
        lambda held, value: held["held"].__setitem__("value", str(value)),
    ),
    "cache_of_a_function": place(
        _cached, lambda held: held.cache_info().currsize, lambda held, value: held(1000 + value)
    ),
    "packed_bytes": place(
        lambda first: bytearray(struct.pack("q", first)),
        lambda held: struct.unpack_from("q", held)[0],
        lambda held, value: struct.pack_into("q", held, 0, value),
    ),
}


@number
def shared_memory(first):
    held = kept(multiprocessing.shared_memory.SharedMemory(create=True, size=16))
    weakref.finalize(held, held.unlink)
    held.buf[0] = first
    return lambda: held.buf[0], functools.partial(operator.setitem, held.buf, 0)


@number
def database(first):
    held = kept(sqlite3.connect(":memory:"))
    held.execute("create table held (value integer)")
    held.execute("insert into held values (?)", (first,))
    return (
        lambda: held.execute("select value from held").fetchone()[0],
        lambda value: held.execute("update held set value = ?", (value,)),
    )


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
def cached_property_of_an_object(first):
    held = CachedOnce()
    held.first = first

    def write(value):
        del held.value
        held.__dict__["value"] = value

    return lambda: held.value, write


@number
def iterator_of_numbers(first):
    held = [itertools.count(first)]

    def read():
        value = next(held[0])
        held[0] = itertools.chain([value], held[0])
        return value

    return read, lambda value: next(held[0])
