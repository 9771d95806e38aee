"""Closures that hold what cannot be walked through safely: opaque, endless, huge, touchy.

Whatever a step holds, a schedule raises nothing that eager does not raise, has no effect on it, and needs bounded time.
"""

from __future__ import annotations

import array
import asyncio
import contextvars
import ctypes
import functools
import io
import queue
import re
import sqlite3
import threading
import time
import types
import unittest.mock
import weakref
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from loops.loop import CHANGE, Loop, task, update
from loops.runner import STEPS, compared

PLAN = {"guard": False, "planner": "serial"}
FEW = 63  # of a loop in which nothing changes later


def check(build, steps=STEPS):
    """Both runs end the same; gives the verdict of the scheduled one, and why."""
    return compared(build, {"machine": hocket.Machine.of(cores=1), **PLAN}, steps=steps, counted=False)[0]


def holding(make, use=None, state=dict, after=None):
    """A builder of a loop whose step has a `held` object in its closure, and uses it if there is a `use` for it."""

    def build():
        model, optimizer, batches = task()
        held = make()

        def step(batch):
            weight = 1.0 if use is None else use(held)
            assert held is not None
            loss = weight * F.cross_entropy(model(batch[0]), batch[1])
            update(optimizer, loss)
            return loss

        def later(n, _):
            if after is not None:
                after(n, held)

        def close():
            if type(held) is sqlite3.Connection:
                held.close()

        return Loop(
            step, model, optimizer, batches, lambda: state(held) if state is not dict else {}, later, close=close
        )

    return build


def looped():
    items = [1.0, {"again": None}, (2.0,)]
    items[1]["again"] = items
    items.append((items, items[1]))
    return items


def nested(depth=10_000):
    items: list = []
    for _ in range(depth):
        items = [items]
    return items


def dead_reference():
    return weakref.ref(type("Gone", (), {})())


def dead_proxy():
    return weakref.proxy(type("Gone", (), {})())


async def waiting():
    await asyncio.sleep(0)


OPAQUE = {
    "array": lambda: array.array("d", [1.0, 2.0]),
    "bytes_io": lambda: io.BytesIO(b"abc"),
    "compressor": zlib.compressobj,
    "ctypes": lambda: (ctypes.c_double * 3)(1.0, 2.0, 3.0),
    "database": lambda: sqlite3.connect(":memory:"),
    "dead_proxy": dead_proxy,
    "dead_reference": dead_reference,
    "event": threading.Event,
    "generator": lambda: (n for n in range(1000)),
    "local": threading.local,
    "lock": threading.Lock,
    "loop_of_containers": looped,
    "mapping_proxy": lambda: types.MappingProxyType({"a": [1]}),
    "memory_view": lambda: memoryview(bytearray(8)),
    "mock": unittest.mock.MagicMock,
    "module": lambda: types.ModuleType("made_up"),
    "nested": nested,
    "pattern": lambda: re.compile("a+"),
    "queue": queue.Queue,
    "thread": threading.Thread,
    "weak_dictionary": weakref.WeakValueDictionary,
    "weak_set": weakref.WeakSet,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_object_that_is_only_held(name):
    check(holding(OPAQUE[name]), FEW)


def test_coroutine_that_is_only_held():
    made = []

    def make():
        made.append(waiting())
        return made[-1]

    check(holding(make))
    for coroutine in made:
        coroutine.close()


# Further ones, which count: `loops.holders`.
USES = {
    "compressor": (zlib.compressobj, lambda c: 1.0 + len(c.compress(b"ab")), lambda c: {"rest": len(c.copy().flush())}),
    "generator": (OPAQUE["generator"], lambda g: 1 / (1 + next(g)), lambda g: {"place": g.gi_frame.f_lasti}),
    "lock": (threading.Lock, lambda lock: 1.0 if lock.acquire() and lock.release() is None else 0.0, dict),
    "loop_of_containers": (
        looped,
        lambda items: items.__setitem__(0, items[0] * 0.99) or items[3][0][0],
        lambda items: {"first": items[0]},
    ),
    "mock": (unittest.mock.MagicMock, lambda m: 1.0 if m.log("a", 1) else 0.0, lambda m: {"calls": len(m.mock_calls)}),
    "pattern": (OPAQUE["pattern"], lambda p: float(len(p.match("aaa")[0])), dict),
}


@pytest.mark.parametrize("name", USES)
def test_opaque_object_that_is_used(name):
    make, use, state = USES[name]
    check(holding(make, use, state), FEW)


class Scaled(nn.Module):
    """Multiplies by a number that a script of it keeps in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is of the past
def test_script_whose_attribute_the_loop_sets():
    def make():
        return torch.jit.script(Scaled())

    def after(n, script):
        script.scale = 1.0 + (n >= CHANGE)

    _, why = check(holding(make, lambda script: script(torch.ones(())), after=after))
    assert "RecursiveScriptModule, whose state cannot be seen" in why


HUGE = {
    "numbers": (lambda: list(range(1_000_000)), lambda t: float(t[5]), lambda t: t.__setitem__(5, 1)),
    "lists": (lambda: [[n] for n in range(1_000_000)], lambda t: float(t[5][0]), lambda t: t[5].__setitem__(0, 1)),
    "entries": (lambda: {n: n for n in range(1_000_000)}, lambda t: float(t[5]), lambda t: t.update({5: 1})),
    "array": (lambda: np.arange(5_000_000.0), lambda t: float(t[5]), lambda t: t.__setitem__(5, 1.0)),
    "text": (lambda: ["x" * 50_000_000], lambda t: float(len(t[0]) % 7), lambda t: t.__setitem__(0, "xx")),
}


@pytest.mark.parametrize("name", HUGE)
def test_million_objects_take_bounded_time(name):
    """Something deep inside changes once; a reason for staying eager names what is too large to be watched."""
    make, use, change = HUGE[name]
    start = time.process_time()
    verdict, why = check(holding(make, use, after=lambda n, t: change(t) if n == CHANGE else None))
    assert time.process_time() - start < 20
    assert verdict == "planned" or "held" in why


@pytest.mark.parametrize("name", [n if n == "lists" else pytest.param(n, marks=pytest.mark.slow) for n in HUGE])
def test_million_objects_that_the_step_does_not_read(name):
    start = time.process_time()
    check(holding(HUGE[name][0]), FEW)
    assert time.process_time() - start < 20


class Touchy:
    """Notes each question; the step reads `value` only, which is an ordinary attribute."""

    def __init__(self) -> None:
        self.__dict__.update(value=1.0, asked=[])

    @property
    def computed(self):
        self.asked.append("computed")
        return 1.0

    @functools.cached_property
    def kept(self):
        self.asked.append("kept")
        return [1.0]

    def __getattr__(self, name):
        self.__dict__["asked"].append(f"getattr {name}")
        raise AttributeError(name)

    def __setattr__(self, name, value):
        self.asked.append(f"setattr {name}")

    def __repr__(self):
        return self._noted("repr", "touchy")

    def __eq__(self, other):
        return self._noted("eq", self is other)

    def __hash__(self):
        return self._noted("hash", 7)

    def __bool__(self):
        return self._noted("bool", True)

    def __len__(self):
        return self._noted("len", 1)

    def __iter__(self):
        return self._noted("iter", iter([1]))

    def __getitem__(self, key):
        return self._noted("getitem", key)

    def __reduce__(self):
        return self._noted("reduce", (Touchy, ()))

    def __deepcopy__(self, memo):
        return self._noted("deepcopy", self)

    def __float__(self):
        return self._noted("float", 1.0)

    def _noted(self, name, answer):
        self.__dict__["asked"].append(name)
        return answer


def test_nothing_is_asked_of_an_object_but_by_the_step():
    check(holding(Touchy, lambda t: t.value, lambda t: {"asked": t.__dict__["asked"], "names": sorted(t.__dict__)}))


class Slotted:
    """Two slots, one of them never filled."""

    __slots__ = ("missing", "value")

    def __init__(self) -> None:
        self.value = 1.0


def context():
    made = contextvars.copy_context()
    made.run(contextvars.ContextVar("weight").set, 0.5)
    return made


@pytest.mark.parametrize(("make", "use"), [(Slotted, lambda slots: slots.value), (context, len)])
def test_slots_with_one_unfilled_and_variables_of_a_context_are_read(make, use):
    assert check(holding(make, use))[0] == "planned"


def test_slot_that_is_changed_between_steps():
    def change(n, held):
        if n == CHANGE:
            held.value = 0.25

    check(holding(Slotted, lambda s: s.value, after=change))


def test_attributes_of_a_mock_are_not_made_by_looking():
    check(holding(unittest.mock.MagicMock, state=lambda m: {"children": sorted(m._mock_children)}))


def test_generator_in_the_closure_is_not_advanced():
    check(holding(OPAQUE["generator"], state=lambda g: {"place": g.gi_frame.f_lasti}))


def test_closure_with_a_variable_that_is_not_bound_yet():
    def build():
        model, optimizer, batches = task()

        def step(batch):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            if loss.shape:
                loss = loss + later
            update(optimizer, loss)
            return loss

        def after(n, _):
            nonlocal later
            if n == CHANGE:
                later = 1.0

        if not batches:
            later = 0.0
        return Loop(step, model, optimizer, batches, after=after)

    check(build)
