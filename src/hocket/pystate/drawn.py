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

import gc
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hocket.arguments import packed, unpacked
from hocket.pystate.apart import addresses_of
from hocket.pystate.layout import instance_dict
from hocket.pystate.parts import split, undivided
from hocket.pystate.places import is_a
from hocket.pystate.step_parts import RETURNED, StepParts, is_end
from hocket.pystate.watch import PurityWatch

# Lists for one way to divide a step, one after the other, before it stays with what it has.
MAX_LISTS = 5
# Keyword argument of the middle.
DRAWN = "_hocket_drawn"
# The place that counts draws. Planned steps write it as they write any other.
_NUM = "_hocket_num_drawn"
# Methods that are no draws, or write what they are given.
_OTHERS = frozenset(("seed", "getstate", "setstate", "get_state", "set_state", "shuffle", "set_bit_generator"))
_SEQUENCES = (tuple, list, torch.Size)
_PLAIN = (int, float, bool, str, type(None), range, type, np.dtype)


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
    """One call of a generator's method.

    Attributes:
        function: the method, as the step finds it.
        args, kwargs: plain values.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def again(self) -> Any:
        """Draw the next number."""
        return self.function(*self.args, **self.kwargs)

    @property
    def is_plain(self) -> bool:
        """True if its arguments are plain values, which no other code writes."""
        return all(map(_is_plain_argument, (*self.args, *self.kwargs.values())))

    def is_like(self, other: Draw) -> bool:
        """True if the other is the same call. Its arguments may be anything."""
        if other.function != self.function or not other.is_plain:
            return False
        return _same((self.args, *self.kwargs.items()), (other.args, *other.kwargs.items()))


class DrawnAhead:
    """The parts of a step of which the middle is given the numbers that it draws. It stands for `StepParts`.

    Args:
        inner: the parts.
        watch: of the step, which has seen it draw.
        num_lists: lists that were made before.

    Attributes:
        middle: that of `inner`, with the numbers as a further argument.
        lines, before, runs_users: of `inner`.
        is_over: its draws cannot be made ahead.
    """

    def __init__(self, inner: StepParts, watch: PurityWatch, num_lists: int = 0) -> None:
        self._inner, self._watch, self._num_lists = inner, watch, num_lists + 1
        self.lines, self.before, self.runs_users = inner.lines, inner.before, inner.runs_users
        self._count = SimpleNamespace(**{_NUM: 0})
        self._generators = list(watch.generators.values())
        self._entries = list(_entries(self._generators, watch.executed.global_names.values()))
        self.is_over = {id(entry.generator) for entry in self._entries} != set(map(id, self._generators))
        self._known: dict[Any, tuple[Draw, ...]] = {}
        self._turn = _Turn((), None)

        def middle(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return self._given(*args, **kwargs)

        middle.__wrapped__ = inner.middle  # type: ignore[attr-defined]  # whose lines a reason names
        self.middle: Callable[..., tuple[Any, ...]] = middle

    def watch(self, roots: Iterable[Any]) -> PurityWatch:
        """A watch of the middle, which sees the number of draws, too."""
        watch = self._inner.watch(roots)
        watch.executed.persistent[id(self._count)] = self._count
        watch.executed.names.add(_NUM)
        watch.executed.user_names.add(_NUM)
        return watch

    def begin(self, batch: Any) -> tuple[Any, Any]:
        """Run what comes before, and draw. The rest as well, where it is not known what will be drawn."""
        own, kept = self._inner.begin(batch)
        if is_end(kept):
            return own, kept
        shapes = tuple(leaf.shape for leaf in tree_leaves(own) if is_a(leaf, (torch.Tensor, np.ndarray)))
        known = self._known.get(shapes)
        if known is None:
            return self._listed(batch, own, kept, shapes), RETURNED
        self._turn = _Turn(known, _states(self._generators))
        setattr(self._count, _NUM, 0)
        args, kwargs = unpacked(own)
        return packed(args, {**kwargs, DRAWN: tuple(draw.again() for draw in known)}), kept

    def end(self, batch: Any, kept: tuple[Any, ...], live: tuple[Any, ...]) -> Any:
        """Run the last part with the result of the middle, and return the step's result."""
        return self._inner.end(batch, kept, live)

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
            self._turn.go_back(getattr(self._count, _NUM))

    def _given(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        turn = self._turn
        turn.begin(kwargs.pop(DRAWN))
        with self._replaced(turn):
            found = self._inner.middle(*args, **kwargs)
        turn.end()
        return found

    def _listed(self, batch: Any, own: Any, kept: tuple[Any, ...], shapes: Any) -> Any:
        """Run the whole step as it is, and list its draws."""
        self._turn = turn = _Turn((), None)
        args, kwargs = unpacked(own)
        with self._replaced(turn):
            live = self._inner.middle(*args, **kwargs)
        self._known[shapes] = tuple(turn.made)
        self.is_over = self.is_over or not turn.is_plain
        return self._inner.end(batch, kept, live)

    @contextmanager
    def _replaced(self, turn: _Turn) -> Iterator[None]:
        """Let the methods of generators ask `turn`."""
        setattr(self._count, _NUM, 0)

        def asked(function: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                return turn.draw(self._count, function, args, kwargs)

            return draw

        made = [(each.table, each.key, each.made(asked), each.table.get(each.key)) for each in self._entries]
        for table, key, one, _ in made:
            table[key] = one
        turn.is_open = True
        try:
            yield
        finally:
            turn.is_open = False
            for table, key, one, before in made:
                if table.get(key) is not one:
                    continue  # the step has bound it anew
                if before is None:
                    del table[key]
                else:
                    table[key] = before


class _Turn:
    """The draws of one step.

    Args:
        known: those that were made ahead.
        states: of the generators, before these were made. None for a step that draws for itself.

    Attributes:
        gives: numbers that were drawn ahead are given.
        is_open: the step runs. Methods that it has kept draw for themselves after it.
        was_left: the step has drawn otherwise.
        made: draws that the step has made for itself, and those before them.
        is_plain: what these were given and what they gave are plain values, or arrays that were given.
    """

    def __init__(self, known: tuple[Draw, ...], states: Sequence[tuple[Any, Any]] | None) -> None:
        self.known = known
        self.gives = states is not None
        self.is_open = self.was_left = False
        self.made: list[Draw] = []
        self.is_plain = True
        self._states = states or ()
        self._drawn: Sequence[Any] = ()
        self._num = 0
        self._thread = threading.get_ident()
        self._is_drawing = False

    def begin(self, drawn: Sequence[Any]) -> None:
        """The step runs, with these numbers."""
        self._drawn, self._num, self.gives = drawn, 0, True

    def end(self) -> None:
        """The step has run."""
        if self.gives and self._num < len(self.known):
            self._leave()

    def _leave(self) -> None:
        self.go_back(self._num)
        self.was_left = True

    def go_back(self, num: int) -> None:
        """Let the generators be where the first draws have left them."""
        for generator, state in self._states:
            _set_state(generator, state)
        for draw in self.known[:num]:
            draw.again()
        self.gives = False

    def draw(self, count: SimpleNamespace, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The next number, which the step asks for with this function and these arguments."""
        if self._is_drawing or not self.is_open or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        made = Draw(function, args, kwargs)
        if self.gives and (self._num == len(self.known) or not self.known[self._num].is_like(made)):
            self._leave()
        if self.gives:
            value = self._drawn[self._num]
        else:
            self._is_drawing = True
            try:
                value = made.again()
            finally:
                self._is_drawing = False
            self.made.append(made)
            self.is_plain = self.is_plain and made.is_plain and _is_plain_result(value)
        self._num += 1
        setattr(count, _NUM, self._num)
        return value


@dataclass(frozen=True, eq=False)
class _Entry:
    """A place where a step finds a method of a generator, or the generator.

    Attributes:
        table, key: the place.
        generator: of `random` or numpy.
        function: the method. None for the generator itself.
    """

    table: Any
    key: str
    generator: Any
    function: Callable[..., Any] | None = None

    def made(self, asked: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """The object that takes this place, whose draws are those of `asked`."""
        if self.function is not None:
            return asked(self.function)
        kind: Any = type(self.generator)
        names = [name for name in dir(kind) if not name.startswith("_") and name not in _OTHERS]
        methods = {name: asked(one) for name in names if callable(one := getattr(self.generator, name))}

        class Asking(kind):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                return methods[name] if name in methods else super().__getattribute__(name)

        is_new = is_a(self.generator, np.random.Generator)
        return Asking(self.generator.bit_generator if is_new else self.generator._bit_generator)


class _Cell:
    """The variable of a closure, as a table."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def get(self, key: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


def _entries(generators: Iterable[Any], spaces: Iterable[tuple[dict[str, Any], Iterable[str]]]) -> Iterator[_Entry]:
    """The places of all methods that draw: of the modules, of the user's own globals, and of an object of `random`."""
    known = [(vars(random), dir(random)), (vars(np.random), dir(np.random)), *spaces]
    for generator in generators:
        found = False
        for table, names in known:
            for name in sorted(names):
                function: Any = table.get(name)
                if getattr(function, "__self__", None) is generator and function.__name__ not in _OTHERS:
                    yield _Entry(table, name, generator, function)
                    found = True
        if not found and is_a(generator, random.Random):
            for name in dir(random.Random):
                if not name.startswith("_") and name not in (*_OTHERS, *vars(generator)) and name != "VERSION":
                    yield _Entry(vars(generator), name, generator, getattr(generator, name))
        elif not found:
            yield from _holders(generator)


def _holders(generator: Any) -> Iterator[_Entry]:
    """The variables of closures and modules, attributes and items that hold a generator of numpy."""
    for holder in gc.get_referrers(generator):
        if type(holder) is CellType:
            yield _Entry(_Cell(holder), "", generator)
            continue
        table = holder if type(holder) is dict else instance_dict(holder)
        for key in [key for key, value in (table or {}).items() if value is generator and type(key) is str]:
            yield _Entry(table, key, generator)


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


def _is_plain_argument(value: Any) -> bool:
    if type(value) in _SEQUENCES:
        return all(map(_is_plain_argument, value))
    return type(value) in _PLAIN or is_a(value, np.dtype)


def _is_plain_result(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain_result, value))
    return type(value) in (int, float, bool, str, np.ndarray) or is_a(value, np.generic)


def _same(one: Any, other: Any) -> bool:
    if type(one) in _SEQUENCES:
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
