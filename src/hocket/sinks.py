"""`hocket.sink`: calls of a step for their effect on the world outside, which a planned step makes after its ops.

A planned step runs ops, and none of the step's Python. What a sink is called with is a result of the step like any
other, so a planned step can call it, in order, when the ops are done.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Sink", "held_sinks", "is_of_sink", "noted_sinks", "run_sinks", "sink"]

# By thread: what takes note of its calls of sinks, and the calls that it holds back.
_NOTING: dict[int, Callable[[Sink, Any, Any], tuple[Any, Any]]] = {}
_HELD: dict[int, list[Any]] = {}


class Sink:
    """A function that a step calls for its effect alone; a call returns None.

    Args:
        function: the user's own.
        key: equal for sinks of one function, and of one method of one object.
    """

    def __init__(self, function: Callable[..., Any], key: Any = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.key = id(function) if key is None else key

    def __get__(self, instance: Any, owner: type | None = None) -> Sink:
        if instance is None or not hasattr(self.function, "__get__"):
            return self
        return Sink(self.function.__get__(instance, owner), (self.key, id(instance)))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        noting = _NOTING.get(threading.get_ident())
        if noting is not None:
            args, kwargs = noting(self, args, kwargs)
        self.function(*args, **kwargs)


def sink(function: Callable[..., Any]) -> Sink:
    """Make a function that a scheduled step may call for its effect: to log, to print, to show progress.

    A planned step calls it after its ops, in the order of the step, with the numbers of that step. What the function
    reads and writes is not watched: it gets what it needs by its arguments (numbers, text, and lists, tuples and dicts
    of these), and the step does not read what it writes. What it returns is dropped; what it raises, the step raises.

    Args:
        function: called with the arguments of the step's call.

    Example:
        >>> import hocket
        >>> log = hocket.sink(lambda loss, number: print(f"step {number}: {loss:.2f}"))
        >>> log(0.25, number=1)
        step 1: 0.25
    """
    if not callable(function):
        raise TypeError(f"hocket.sink takes a function, not {function!r}")
    return function if isinstance(function, Sink) else Sink(function)


def run_sinks(sinks: Sequence[Sink], calls: Sequence[Any]) -> None:
    """Make the calls of a planned step, or hold them back where the step is only compared."""
    held = _HELD.get(threading.get_ident())
    if held is not None:
        held += [(each.key, call) for each, call in zip(sinks, calls, strict=True)]
        return
    for each, (args, kwargs) in zip(sinks, calls, strict=True):
        try:
            each.function(*args, **kwargs)
        except Exception as error:
            error.__dict__["_is_of_hocket_sink"] = True
            raise


def is_of_sink(error: BaseException) -> bool:
    """Whether a sink raised it that a planned step called: all ops had run, and the step may not be made again."""
    return "_is_of_hocket_sink" in getattr(error, "__dict__", ())


@contextmanager
def noted_sinks(note: Callable[[Sink, Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """While the block lasts, calls of sinks by this thread go by `note`, which gives the arguments to call with."""
    here = threading.get_ident()
    before = _NOTING.get(here)
    _NOTING[here] = note
    try:
        yield
    finally:
        if before is None:
            del _NOTING[here]
        else:
            _NOTING[here] = before


@contextmanager
def held_sinks(held: list[Any]) -> Iterator[None]:
    """While the block lasts, planned steps of this thread put their calls of sinks in the list and make none."""
    here = threading.get_ident()
    before = _HELD.get(here)
    _HELD[here] = held
    try:
        yield
    finally:
        if before is None:
            del _HELD[here]
        else:
            _HELD[here] = before
