"""Processes that take part in one measurement, each with a pipe to the process that started them.

And the memory of a process, as Linux reports it: resident now, and its peak since a moment.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hocket.errors import InputError


def in_process(function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    """Return what a function of a module returns in a new process, or raise what it raises.

    Raises:
        InputError: it took longer, or the process ended.
    """
    with started(_answer, [(function, args)]) as (pipe,):
        if not pipe.poll(timeout_s):
            raise InputError(f"bench: {function.__name__} did not answer within {timeout_s:.0f} s")
        value, error = pipe.recv()
    if error is not None:
        raise error
    return value


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*args), None))
    except Exception as error:  # noqa: BLE001  # raised again by who asked
        pipe.send((None, error))


@contextmanager
def started(
    work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, preload: str | None = None
) -> Iterator[list[Connection]]:
    """Start a process for each element of `arguments`, which `work` receives behind its end of a pipe.

    The processes are killed at the end of the block.

    Args:
        work: a function of a module, which is imported there.
        arguments: of each process.
        preload: a module that is imported once and then forked. If None, each process starts from nothing.

    Yields:
        Our ends of the pipes.

    Raises:
        InputError: a process ended without an answer.
    """
    context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload([preload])
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for each in arguments:
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, *each)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield pipes
    except EOFError as error:
        raise InputError("bench: a process has ended without an answer") from error
    finally:
        for process in processes:
            process.kill()
            process.join()


def results(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], preload: str) -> list[Any]:
    """Start processes as `started` does, and return what each sends.

    Raises:
        InputError: a process failed: it ended, or sent a string, which says why.
    """
    with started(work, arguments, preload=preload) as pipes:
        found = [pipe.recv() for pipe in pipes]
    for each in found:
        if isinstance(each, str):
            raise InputError(f"bench: {each}")
    return found


_PEAK, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def is_measurable() -> bool:
    """Return True if the system reports the peak since a moment."""
    return os.access(_PEAK, os.W_OK)


def set_back_peak() -> None:
    """Start a new peak."""
    _PEAK.write_text("5")


def peak_bytes() -> float:
    """Return the peak of resident memory since `set_back_peak`."""
    return _field_bytes("VmHWM")


def resident_bytes() -> float:
    """Return the resident memory."""
    return _field_bytes("VmRSS")


def _field_bytes(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return float(line.split()[1]) * 1024
