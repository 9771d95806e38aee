"""What a trace writes into Python state is put back: one object of each kind, written as a step would."""

from __future__ import annotations

import collections
import contextvars
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hocket.pystate.undo import Before

from hocket.pystate.watch import PurityWatch


class Attributes:
    def __init__(self) -> None:
        self.count = 1


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


class Namespace:
    count = 1


def _context() -> contextvars.ContextVar[int]:
    made: contextvars.ContextVar[int] = contextvars.ContextVar("made")
    made.set(1)
    return made


def _set_new_attribute(held: Any) -> None:
    held.count = 2
    held.further = 3


def _advance(held: Any) -> None:
    next(held)


# How to make it, how a step writes it, and what tells its state.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "list": (lambda: [1, 2], lambda held: held.append(3), list),
    "dict": (lambda: {"a": 1, "b": 2}, lambda held: (held.pop("a"), held.update(c=3)), lambda held: list(held.items())),
    "deque": (lambda: collections.deque([1, 2], 2), lambda held: held.append(3), list),
    "set": (lambda: {1, 2}, lambda held: held.add(3), set),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.__setitem__(0, 99), bytes),
    "array": (lambda: np.zeros(3), lambda held: held.__setitem__(1, 5.0), lambda held: held.tolist()),
    "array of objects": (
        lambda: np.array([None, "a"], object),
        lambda held: held.__setitem__(0, "b"),
        lambda held: held.tolist(),
    ),
    "attribute": (Attributes, _set_new_attribute, lambda held: dict(vars(held))),
    "slot": (Slotted, lambda held: setattr(held, "count", 2), lambda held: held.count),
    "class": (lambda: Namespace, lambda held: setattr(held, "count", held.count + 1), lambda held: held.count),
    "context variable": (_context, lambda held: held.set(2), lambda held: held.get()),
    "random": (lambda: random.Random(3), lambda held: held.random(), lambda held: held.getstate()),
    "numpy": (lambda: np.random.default_rng(3), lambda held: held.random(), lambda held: held.bit_generator.state),
    "torch": (torch.Generator, lambda held: torch.rand(2, generator=held), lambda held: held.get_state().tolist()),
    "iterator": (lambda: iter([1, 2, 3]), _advance, lambda held: held.__length_hint__()),
    "stream": (lambda: io.StringIO("abc"), lambda held: held.read(1), lambda held: held.tell()),
}


def watched(held: Any, write: Any) -> tuple[PurityWatch, Any]:
    def step(batch: Any) -> Any:
        if batch:
            write(held)
        return held

    watch = PurityWatch(step, ())
    for _ in range(2):
        watch.run(step, False)
    return watch, step


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_it_was(kind):
    make, write, state = KINDS[kind]
    held = make()
    watch, step = watched(held, write)
    then = state(held)
    before = Before(watch)
    step(True)
    assert state(held) != then, "the step writes"
    changes, lasting = before.undo()
    assert changes
    assert not lasting
    assert state(held) == then


def test_nothing_is_said_where_nothing_was_written():
    watch, step = watched([1], list.clear)
    before = Before(watch)
    step(False)
    assert before.undo() == ([], [])


def test_what_cannot_be_put_back_is_named():
    watch, step = watched(iter({1: 2, 3: 4}), _advance)
    before = Before(watch)
    step(True)
    changes, lasting = before.undo()
    assert [change.place.kind for change in changes] == [change.place.kind for change in lasting] == ["state"]


def test_a_closed_file_is_no_reason_to_fail():
    held = io.StringIO("abc")
    held.close()
    watch, _ = watched(held, lambda file: None)
    assert Before(watch).undo() == ([], [])
