"""Objects whose own methods raise: the walk runs none of them, and training goes on whatever they do."""

from __future__ import annotations

import collections
import ctypes
import decimal
import enum
import random
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from hocket.pystate.executed import ExecutedCode
from hocket.pystate.kinds import reachable
from hocket.pystate.places import are_like, describe, same, shown
from support.steps import update
from support.twins import Program, captured

SPECIAL = (  # noqa: SIM905
    "__eq__ __hash__ __len__ __bool__ __iter__ __next__ __contains__ __getitem__ __repr__ __str__ __format__ __dir__"
    " __getattr__ __getattribute__ __setattr__ __reduce__ __reduce_ex__ __getstate__ __copy__ __deepcopy__ __array__"
    " __float__ __int__ __index__ __call__ __enter__ __del__ __sizeof__ __torch_function__ __instancecheck__ __get__"
    " tobytes getstate get_state cache_info tell values items keys"
).split()


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not to be called")


def hostile(name: str, base: type = object) -> Any:
    """An instance of a class with this one method, which raises."""
    body = {name: raising}
    if name == "__eq__":
        body["__hash__"] = base.__hash__ or object.__hash__
    if name == "__del__":
        body["__del__"] = lambda self: None
    return type(f"Hostile{name}", (base,), body)


class NoClass:
    __class__ = property(raising)  # type: ignore[assignment]


class NoDict:
    __dict__ = property(raising)  # type: ignore[assignment]


class Colour(enum.Enum):
    RED = 1
    __eq__ = __repr__ = __str__ = raising
    __hash__ = enum.Enum.__hash__


class Key:
    def __hash__(self) -> int:
        return 3

    __eq__ = __repr__ = raising


class NoDraws(random.Random):
    getstate = raising


class NoBytes(np.ndarray[Any, Any]):
    tobytes = __eq__ = __iter__ = __len__ = __getitem__ = raising
    nbytes = size = flat = property(raising)  # type: ignore[assignment]


def made_of(base: type) -> Any:
    methods = ("__iter__", "__len__", "__eq__", "__contains__", "__getitem__", "items", "values", "keys", "__bool__")
    return type(f"Hostile{base.__name__}", (base,), dict.fromkeys(methods, raising) | {"__hash__": base.__hash__})


OBJECTS: dict[str, Any] = {
    **{name: hostile(name) for name in SPECIAL},
    **{f"{base.__name__} that is made over": made_of(base) for base in (dict, list, set, frozenset)},
    "deque": made_of(collections.deque),
    "OrderedDict": made_of(collections.OrderedDict),
    "class": NoClass,
    "dict": NoDict,
    "SystemRandom": random.SystemRandom,
    "Random": NoDraws,
    "masked": lambda: np.ma.masked,
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "array": lambda: np.zeros(3).view(NoBytes),
    "array of objects": lambda: np.array([hostile("__eq__")(), Colour.RED], dtype=object),
    "record": lambda: np.rec.array([(1, 2.0)]),
    "enumeration": lambda: Colour.RED,
    "key": lambda: {Key(): 1},
    "key that is an enumeration": lambda: {Colour.RED: 1, (Colour.RED, 2): 3},
    "member": lambda: {Key()},
    "nested": lambda: {"a": [np.ma.masked, (hostile("__hash__")(),), types.SimpleNamespace(x=hostile("__bool__")())]},
    "mock": mock.MagicMock,
    "context of decimal": decimal.getcontext,
    "int": lambda: hostile("__eq__", int)(3),
    "float": lambda: hostile("__hash__", float)(3.0),
    "str": lambda: hostile("__eq__", str)("text"),
    "exception": lambda: hostile("__str__", ValueError)("text"),
    "structure": lambda: type("Point", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_int)], "__eq__": raising})(3),
}


def together(count: int) -> dict[str, list[str]]:
    """Several of the objects at a time, by the name of the first one."""
    names = list(OBJECTS)
    return {names[first]: names[first : first + count] for first in range(0, len(names), count)}


@pytest.mark.parametrize("place", ["model", "list"])
@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, id=f"{name} to {names[-1]}") for name, names in together(8).items()),
        *(pytest.param(names, id=name, marks=pytest.mark.slow) for name, names in together(1).items()),
    ],
)
def test_a_step_that_can_reach_them_is_captured(names, place):
    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        held = [OBJECTS[name]() for name in names]
        read: Any = {"model": lambda: model.thing_0, "list": lambda: held[0]}[place]
        if place == "model":
            for number, thing in enumerate(held):
                object.__setattr__(model, f"thing_{number}", thing)

        def step(batch: torch.Tensor) -> torch.Tensor:
            found = read()
            return update(optimizer, model(batch).square().mean() * (found is not None)).detach()

        return Program(step, model, optimizer)

    captured(make, lambda number: torch.randn(4, 6))


@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_compared_and_named(name):
    thing = OBJECTS[name]()
    assert same(thing, thing)
    for other in (OBJECTS[name](), None, 3):
        assert same(thing, other) in (True, False)
        assert are_like(thing, other) in (True, False)
    assert are_like((thing,), (None,)) is False
    assert isinstance(shown(thing), str)
    assert isinstance(describe(((None, "", "table"), "[]", thing)), str)


def test_what_cannot_be_looked_into_is_named_with_a_cure():
    """A random generator that has to say itself where it stands."""

    class Own(np.random.RandomState):
        get_state = raising

    own = Own()

    def step() -> Any:
        return own

    found = reachable(step, (), ExecutedCode())
    assert list(found.opaque) == [
        "closure of step: own cannot be looked into (RuntimeError: not to be called): keep it out of the step's reach"
    ]


def test_the_content_of_an_array_is_shown_by_its_size():
    assert shown(bytes(1200)) == "1,200 bytes"
