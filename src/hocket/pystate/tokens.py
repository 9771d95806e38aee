"""State that advances when it is read, as a value to compare: random generators and iterators."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hocket.pystate.places import is_a, is_plain

# Iterators within iterators, and what they say of their places.
MAX_DEPTH, MAX_PARTS = 20, 1000

_EMPTY: tuple[Any, ...] = ([], (), range(0), {}, {}.items(), {}.values(), set(), "", b"")

DRAWING = (random.Random, np.random.Generator, np.random.RandomState)  # by their methods
GENERATORS = (torch.Generator, *DRAWING)
ITERATORS: tuple[type, ...] = (
    itertools.cycle, itertools.count, itertools.repeat, itertools.chain, itertools.islice, zip, map, enumerate, filter,
    reversed, *(type(iter(each)) for each in _EMPTY),
)  # fmt: skip


# Generators of the modules, in whose dicts a test may put other functions.
OF_RANDOM: Any = random.random.__self__  # type: ignore[attr-defined]
OF_NUMPY: Any = np.random.rand.__self__  # type: ignore[attr-defined]


def generator_of(owner: Any) -> Any:
    """The generator of the module `random` or `numpy.random`. Any other object is its own."""
    return OF_RANDOM if owner is random else OF_NUMPY if owner is np.random else owner


def generator_state(value: Any) -> Any:
    """The state of a generator of `random`, numpy or torch. None for one that asks the system, which is noticed."""
    if is_a(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if is_a(value, random.Random):
        return None if is_a(value, random.SystemRandom) else hash(random.Random.getstate(value))
    if is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    state: Any = value.get_state()
    return (state[1].tobytes(), *state[2:])


def iterator_state(value: Any) -> tuple[Any, ...]:
    """The position of one of Python's own iterators. One without, or in front of too many others, raises."""
    state = tuple(itertools.islice(_flat(value.__reduce__(), 0), MAX_PARTS + 1))
    if len(state) > MAX_PARTS:
        raise ValueError("an iterator of too many parts")
    return state


def _flat(state: Any, depth: int) -> Iterator[Any]:
    """Return the position that an iterator reports, with objects replaced by their identity."""
    if depth > MAX_DEPTH:
        raise ValueError("iterators of iterators, too deep to look into")
    for each in state:
        if is_a(each, tuple):
            yield from _flat(each, depth)
        elif is_plain(each):
            yield (type(each), each)
        elif is_a(each, ITERATORS):
            yield from _flat(each.__reduce__(), depth + 1)
        else:
            yield id(each)
