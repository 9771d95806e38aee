"""Ctrl-C held back while a step is not whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hocket import native


def native_holders() -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return functions that begin and end a hold, at a fraction of a microsecond each. Without the core they are
    no-ops.

    The first returns True if the second has to be called. It raises an interrupt that came before the hold.
    """
    if not native.available():
        return (lambda: False), (lambda: None)
    core = native.load()
    return core.hold_interrupts, core.release_interrupts


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block. A second one goes through at once.

    Without the native core, only the main thread can hold it back (Python allows no other to).
    """
    if native.available():
        hold, release = native_holders()
        held = hold()
        try:
            yield
        finally:
            if held:
                release()
    elif threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
        yield from _held_by_python()
    else:
        yield


def _held_by_python() -> Iterator[None]:
    usual: Any = signal.getsignal(signal.SIGINT)
    noted: list[Any] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            usual(number, frame)
        noted.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if noted:
            usual(signal.SIGINT, noted[0])
