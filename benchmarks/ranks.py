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

from benchmarks.namespaces import Namespace, enter
from hocket.errors import InputError


def in_process(function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    """Return what a function of a module returns in a new process, or raise what it raises."""
    with started(_answer, [(function, args)]) as (pipe,):
        return heard(pipe, timeout_s)


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*args), None))
    except Exception as error:  # noqa: BLE001  # raised again by who asked
        pipe.send((None, error))


def heard(pipe: Connection, timeout_s: float | None = None) -> Any:
    """Return the value that a process sent, or raise the error in place of one, or `InputError` if it took longer."""
    if not pipe.poll(timeout_s):
        raise InputError(f"bench: a process did not answer within {timeout_s:.0f} s")
    try:
        value, error = pipe.recv()
    except EOFError as ended:
        raise InputError("bench: a process has ended without an answer") from ended
    if error is not None:
        raise error
    return value


@contextmanager
def started(
    work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, preload: str | None = None, daemon: bool = False
) -> Iterator[list[Connection]]:
    """Start a process for each element of `arguments`, which `work` receives behind its end of a pipe, and yield ours.

    The processes are killed at the end of the block. Their module is imported anew, or forked from one process that has
    imported `preload`. Those that are a `daemon` end with this process, too.

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
            processes.append(context.Process(target=work, args=(theirs, *each), daemon=daemon))
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


def results(
    work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], preload: str, num_answers: int | None = None
) -> list[Any]:
    """Run a function in a process for each element of `arguments`, side by side, and return what each returns.

    All are killed once `num_answers` of the first processes have answered, or all. Those of them that fail raise.
    """
    asked = [(rank, work, each) for rank, each in enumerate(arguments)]
    with started(_answer_and_stay, asked, preload=preload) as pipes:
        return [heard(pipe) for pipe in pipes[:num_answers]]


def _answer_and_stay(pipe: Connection, rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    found: tuple[Any, InputError | None]
    try:
        found = work(*args), None
    except Exception as error:  # noqa: BLE001  # raised by who asked
        found = None, InputError(f"bench: rank {rank}: {type(error).__name__}: {error}")
    pipe.send(found)
    pipe.recv()  # until it is killed: others may still want what this process keeps


def join_job(rank: int, world: int, address: str, port: int, end: Namespace | None = None) -> None:
    """Make this process a rank of a job with one thread, as ``torchrun`` does, at an end of a link if there is one."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if end is not None:
        enter(end.name)
        os.environ["GLOO_SOCKET_IFNAME"] = end.interface


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
