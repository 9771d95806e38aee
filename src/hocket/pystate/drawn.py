"""Numbers that a step draws between its ops, drawn ahead of them and given to the step where it asks for them.

A planned step runs no Python, so nothing in it can draw with `random` or numpy. But a draw needs nothing of an op: it
may be made before the first one, by the same call, in the same order, and then it is an input like those of the
batch. `hocket.pystate.cuts` moves such calls by their place in the step's own body. This is for all others: behind an
op, in a forward, in a helper::

    first step     runs as it is, and its draws are listed: which function, with which arguments
    ahead          the calls of the list, one after the other: the last argument of the middle
    middle         a graph, or the user's code, whose draws get these numbers in place of new ones

Where the user's code asks for another draw than the list has next, all generators go back, the draws so far are made
again, and the step draws for itself from there on. What was recorded in that step is dropped, and the next one is
listed anew, a few times at most. After a step that raised the generators go back in the same way, to the draws that
were made before the op that raised.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hocket.arguments import packed, unpacked
from hocket.pystate.apart import addresses_of
from hocket.pystate.generator_places import GeneratorPlace, exchanged, generator_places
from hocket.pystate.parts import split, undivided
from hocket.pystate.places import is_a, is_plain, same
from hocket.pystate.step_parts import RETURNED, StepParts, is_end
from hocket.pystate.tokens import generator_state
from hocket.pystate.watch import PurityWatch

# Lists for one way to divide a step, one after the other, before it stays with what it has.
MAX_LISTS = 5
# Keyword argument of the middle.
DRAWN = "_hocket_drawn"
# The place that counts draws. Planned steps write it as they write any other.
NUM_DRAWN = "_hocket_num_drawn"
# Methods that are no draws, or write what they are given.
_OTHERS = frozenset(
    (
        *("seed", "getstate", "setstate", "get_state", "set_state", "shuffle", "spawn"),
        *("get_bit_generator", "set_bit_generator"),
    )
)
_SEQUENCES = (tuple, list, torch.Size)


def ways(watch: PurityWatch) -> list[StepParts | DrawnAhead]:
    """The ways to divide a watched step, those first that need no numbers to be given."""
    divided = split(watch.step, watch.executed.lines, addresses_of(watch.roots))
    found: list[StepParts | DrawnAhead] = [parts for parts in divided if not parts.leaves_draws]
    if watch.generators:
        sunk = [parts for parts in divided if parts.passed]
        found += [DrawnAhead(parts, watch) for parts in (*divided[:1], *sunk[:1], undivided(watch.step))]
    return found


@dataclass(frozen=True, eq=False)
class Draw:
    """One call of a generator's method."""

    function: Callable[..., Any]  # the method, as the step finds it
    args: tuple[Any, ...]  # plain values
    kwargs: Mapping[str, Any]

    def again(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def is_plain(self) -> bool:
        """True if it may be made ahead: a draw whose arguments are plain values."""
        if self.function.__name__ in _OTHERS:
            return False
        return all(map(_is_plain_argument, (*self.args, *self.kwargs.values())))

    def copied(self) -> Draw:
        """The call with lists of its own, which the step does not write."""
        return Draw(self.function, _copied(self.args), {key: _copied(each) for key, each in self.kwargs.items()})

    def is_like(self, other: Draw) -> bool:
        """True if the other is the same call. Its arguments may be anything."""
        if other.function != self.function or not other.is_plain:
            return False
        return _same((self.args, *self.kwargs.items()), (other.args, *other.kwargs.items()))


class DrawnAhead:
    """The parts of a step of which the middle is given the numbers that it draws. It stands for `StepParts`.

    Attributes:
        middle: that of `inner`, with the numbers as a further argument.
        lines, before, runs_users: of `inner`.
        is_over: its draws cannot be made ahead.
    """

    def __init__(self, inner: StepParts, watch: PurityWatch, num_lists: int = 0) -> None:
        self._inner, self._watch, self._num_lists = inner, watch, num_lists + 1
        self.lines, self.before, self.runs_users = inner.lines, inner.before, inner.runs_users
        self._count = SimpleNamespace(**{NUM_DRAWN: 0})
        self._generators = list(watch.generators.values())
        self._places: list[GeneratorPlace] = []
        tells_types = bool(watch.executed.asks_types)
        if (places := generator_places(self._generators, watch.look(), tells_types)) is not None:
            self._places = places
        self._reached = [each for each in self._places if each.is_reached]
        self.is_over = places is None
        self._known: dict[Any, tuple[Draw, ...]] = {}
        self._turn = _Turn((), None)

        def middle(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return self._given(*args, **kwargs)

        middle.__wrapped__ = inner.middle  # type: ignore[attr-defined]  # whose lines a reason names
        self.middle: Callable[..., tuple[Any, ...]] = middle

    def watch(self, roots: Iterable[Any]) -> PurityWatch:
        """A watch of the middle, which sees the number of draws, too."""
        watch = self._inner.watch(roots)
        watch.executed.asks_draws = True
        watch.executed.persistent[id(self._count)] = self._count
        watch.executed.names.add(NUM_DRAWN)
        watch.executed.user_names.add(NUM_DRAWN)
        return watch

    def begin(self, batch: Any) -> tuple[Any, Any]:
        own, kept = self._inner.begin(batch)
        if is_end(kept):
            return own, kept
        shapes = tuple(leaf.shape for leaf in tree_leaves(own) if is_a(leaf, (torch.Tensor, np.ndarray)))
        known = self._known.get(shapes)
        if known is None:
            return self._listed(batch, own, kept, shapes), RETURNED
        self._turn = _Turn(known, _states(self._generators))
        setattr(self._count, NUM_DRAWN, 0)
        self._turn.ahead = tuple(draw.again() for draw in known)
        args, kwargs = unpacked(own)
        return packed(args, {**kwargs, DRAWN: self._turn.ahead}), kept

    def alone(self, own: Any) -> Any:
        """Run the middle as eager does: it draws its own numbers."""
        args, kwargs = unpacked(own)
        return self._inner.alone(packed(args, {key: value for key, value in kwargs.items() if key != DRAWN}))

    def end(self, batch: Any, kept: tuple[Any, ...], live: tuple[Any, ...]) -> Any:
        """Run the last part with the result of the middle, and return the step's result."""
        return self._inner.end(batch, kept, _exchanged(live, _arrays(self._turn.ahead)))

    @property
    def holds(self) -> bool:
        """True if each generator is still where the step has found it."""
        return self._inner.holds and all(each.holds for each in self._reached)

    @property
    def was_left(self) -> bool:
        """True if the last step has drawn otherwise than its list says."""
        return self._turn.was_left

    def anew(self) -> list[DrawnAhead]:
        """The same parts with a list that is made anew, unless many were."""
        return [DrawnAhead(self._inner, self._watch, self._num_lists)] if self._num_lists < MAX_LISTS else []

    def raised(self) -> None:
        """The middle has raised: the generators go back to where its draws so far have left them."""
        if self._turn.gives:
            self._turn.go_back(getattr(self._count, NUM_DRAWN))

    def _given(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        turn = self._turn
        turn.begin(kwargs.pop(DRAWN))
        with self._replaced(turn):
            found = self._inner.middle(*args, **kwargs)
        name_of = {id(each): name for name, each in _arrays(turn.end()).items()}
        result: tuple[Any, ...] = _exchanged(found, name_of)
        return result

    def _listed(self, batch: Any, own: Any, kept: tuple[Any, ...], shapes: Any) -> Any:
        """Run the whole step as it is, and list its draws."""
        self._turn = turn = _Turn((), None)
        args, kwargs = unpacked(own)
        states = _states(self._generators)
        with self._replaced(turn):
            live = self._inner.middle(*args, **kwargs)
        self._known[shapes] = tuple(turn.made)
        self.is_over = self.is_over or not (turn.is_plain and _are_all(turn.made, states))
        return self._inner.end(batch, kept, live)

    @contextmanager
    def _replaced(self, turn: _Turn) -> Iterator[None]:
        """Let the methods of generators ask `turn`."""
        setattr(self._count, NUM_DRAWN, 0)

        def asked(function: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                return turn.draw(self._count, function, args, kwargs)

            return draw

        with exchanged(self._places, asked):
            turn.is_open = True
            try:
                yield
            finally:
                turn.is_open = False


class _Turn:
    """The draws of one step.

    Args:
        known: those that were made ahead.
        states: of the generators, before these were made. None for a step that draws for itself.
    """

    def __init__(self, known: tuple[Draw, ...], states: Sequence[tuple[Any, Any]] | None) -> None:
        self.known = known
        self.ahead: tuple[Any, ...] = ()  # what they gave
        self.gives = states is not None  # numbers that were drawn ahead are given
        self.is_open = False  # the step runs. Methods that it has kept draw for themselves after it.
        self.was_left = False  # the step has drawn otherwise
        self.made: list[Draw] = []  # draws that the step has made for itself, and those before them
        self.is_plain = True  # what these were given and what they gave are plain values, or arrays that were given
        self._states = states or ()
        self._drawn: Sequence[Any] = ()
        self._num = 0
        self._thread = threading.get_ident()
        self._is_drawing = False

    def begin(self, drawn: Sequence[Any]) -> None:
        self._drawn, self._num, self.gives = drawn, 0, True

    def end(self) -> Sequence[Any]:
        """The step has run. Return the numbers that it was given."""
        if self.gives and self._num < len(self.known):
            self._leave()
        return self._drawn

    def _leave(self) -> None:
        self.go_back(self._num)
        self.was_left = True

    def go_back(self, num: int) -> None:
        """Let the generators be where the first draws have left them."""
        self._is_drawing = True
        try:
            _go_to(self._states, self.known[:num])
        finally:
            self._is_drawing = False
        self.gives = False

    def draw(self, count: SimpleNamespace, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The next number, which the step asks for with this function and these arguments."""
        if self._is_drawing or not self.is_open or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        made = Draw(function, args, kwargs).copied()
        if self.gives and (self._num == len(self.known) or not self.known[self._num].is_like(made)):
            self._leave()
        if self.gives:
            value = self._drawn[self._num]
        else:
            self._is_drawing = True
            try:
                value = function(*args, **kwargs)
            finally:
                self._is_drawing = False
            self.made.append(made)
            is_given = any(value is each for given in (*args, *kwargs.values()) for each in _items(given))
            self.is_plain = self.is_plain and made.is_plain and _is_plain_result(value) and not is_given
        self._num += 1
        setattr(count, NUM_DRAWN, self._num)
        return value


def _arrays(drawn: Sequence[Any]) -> dict[Any, Any]:
    """Arrays that were drawn, by the names that the middle returns in place of them, as no graph returns an array."""
    return {f"{DRAWN}_{place}": each for place, each in enumerate(drawn) if isinstance(each, np.ndarray)}


def _exchanged(value: Any, new: Mapping[Any, Any]) -> Any:
    """`value` with others in place of some names, or of arrays by their addresses."""
    if type(value) is tuple:
        return tuple(_exchanged(each, new) for each in value)
    if isinstance(value, np.ndarray):
        return new.get(id(value), value)
    return new.get(value, value) if type(value) is str else value


def _states(generators: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(each, _state(each)) for each in generators]


def _state(generator: Any) -> Any:
    if is_a(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if is_a(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if is_a(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if is_a(generator, random.Random) else generator.set_state)(state)


def _go_to(states: Iterable[tuple[Any, Any]], draws: Iterable[Draw] = ()) -> None:
    """Let generators have these states, and draw."""
    for generator, state in states:
        _set_state(generator, state)
    for draw in draws:
        draw.again()


def _are_all(made: Iterable[Draw], states: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether these draws are all that has moved the generators since they had these states."""
    after = _states(each for each, _ in states)
    tokens = [generator_state(each) for each, _ in states]
    _go_to(states, made)
    found = [generator_state(each) for each, _ in states]
    _go_to(after)
    return found == tokens


def _is_plain_argument(value: Any) -> bool:
    if type(value) in _SEQUENCES:
        return all(map(_is_plain_argument, value))
    return type(value) is type or is_plain(value) or _is_numbers(value)


def _is_numbers(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.kind in "biuf"


def _is_plain_result(value: Any) -> bool:
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) is np.ndarray or (value is not None and is_plain(value))


def _items(value: Any) -> Sequence[Any]:
    """The lists in a list that a draw may choose from, and give the same object."""
    return [each for each in value if type(each) is list] if type(value) in _SEQUENCES else ()


def _copied(value: Any) -> Any:
    if _is_numbers(value):
        return value.copy()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _same(one: Any, other: Any) -> bool:
    if type(one) in _SEQUENCES:
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if _is_numbers(one) and _is_numbers(other):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return same(one, other)
