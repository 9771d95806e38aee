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

from hocket.errors import InputError

# Gets each call of a sink: what makes it, and its arguments. It makes the call or holds it back.
Listener = Callable[["Sink", Callable[..., object], tuple[Any, ...], dict[str, Any]], object]
_LISTENERS: dict[int, Listener] = {}  # by thread


class Sink:
    """A function of the user's that a step calls only for its effect. A call returns None.

    Keys are equal for sinks of one function, and of one method of one object. A step that may catch what one with
    `may_raise` raises cannot be planned.
    """

    def __init__(self, function: Callable[..., Any], key: Any = None, may_raise: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.may_raise = may_raise
        self.key = id(function) if key is None else key

    def __get__(self, instance: Any, owner: type | None = None) -> Sink:
        if instance is None or not hasattr(self.function, "__get__"):
            return self
        return Sink(self.function.__get__(instance, owner), (self.key, id(instance)))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        listener = _LISTENERS.get(threading.get_ident())
        if listener is None:
            self.function(*args, **kwargs)
        else:
            listener(self, self.function, args, kwargs)


def sink(function: Callable[..., Any]) -> Sink:
    """Make a function that a scheduled step may call for its effect: to log, to print, to show progress.

    A planned step calls it after its ops, in the order of the step, with the numbers of that step. Its reads and writes
    are not watched: it must get all that it needs by its arguments (numbers, text, and lists, tuples and dicts of
    these), and the step must not read what it writes. Its result is dropped, and its exceptions are raised by the step.

    Args:
        function: called with the arguments of the step's call.

    Raises:
        InputError: it cannot be called.

    Example:
        >>> import hocket
        >>> log = hocket.sink(lambda loss, number: print(f"step {number}: {loss:.2f}"))
        >>> log(0.25, number=1)
        step 1: 0.25
    """
    if not callable(function):
        raise InputError(f"hocket.sink: expected a function, got {type(function).__name__}")
    return function if isinstance(function, Sink) else Sink(function)


def run_sinks(sinks: Sequence[Sink], calls: Sequence[Any]) -> None:
    """Make the calls of a planned step: of each sink with its arguments and keyword arguments."""
    for each, (args, kwargs) in zip(sinks, calls, strict=True):
        try:
            each(*args, **kwargs)
        except Exception as error:
            error.__dict__["_is_of_hocket_sink"] = True
            raise


def is_of_sink(error: BaseException) -> bool:
    """True if a sink raised it that a planned step called: all ops had run, and the step may not be made again."""
    return "_is_of_hocket_sink" in getattr(error, "__dict__", ())


@contextmanager
def sinks_heard(listener: Listener) -> Iterator[None]:
    """While the block lasts, calls of sinks by this thread go by `listener`, whether by the step or by a plan of it.

    What it lets pass goes by the listener of the block around this one, if there is one.
    """
    here = threading.get_ident()
    before = _LISTENERS.get(here)

    def hear(sink: Sink, make: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener(sink, make if before is None else lambda *a, **kw: before(sink, make, a, kw), args, kwargs)

    _LISTENERS[here] = hear
    try:
        yield
    finally:
        if before is None:
            del _LISTENERS[here]
        else:
            _LISTENERS[here] = before


@contextmanager
def sinks_held(held: list[Any] | None = None) -> Iterator[None]:
    """While the block lasts, this thread calls no sink. Key and arguments of each call are added to `held`."""

    def hold(sink: Sink, _: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if held is not None:
            held.append((sink.key, (args, kwargs)))

    with sinks_heard(hold):
        yield
