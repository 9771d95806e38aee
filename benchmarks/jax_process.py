"""A process in which JAX trains, beside torch's: their threads would get in each other's way in one.

The process times its steps itself, some in a row: what a pipe takes is not part of a step, nor what JAX's threads,
which fall asleep between two questions, take to wake up. In a loop of steps they would be awake.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from time import perf_counter
from typing import Any

__all__ = ["IN_A_ROW", "JaxProcess", "jax_missing", "mean_s"]

PATIENCE_S = 120.0  # for the first step, which is compiled
IN_A_ROW = 4  # steps for each one that is asked for, where they are timed


def jax_missing() -> str:
    """Return why JAX cannot be measured here, empty if it can."""
    return "" if importlib.util.find_spec("jax") else "jax: is not installed: pip install -e '.[jax]'"


def mean_s(step: Callable[[], Any], in_a_row: int) -> float:
    """Return the mean seconds of a step over several in a row without the first, or of a single one.

    Example:
        >>> mean_s(lambda: None, 4) < 1.0
        True
    """
    begin = perf_counter()
    for number in range(in_a_row):
        if number == 1:
            begin = perf_counter()
        step()
    return (perf_counter() - begin) / max(1, in_a_row - 1)


class JaxProcess:
    """A process that answers questions.

    Args:
        serve: what runs in it, with its end of the pipe and `arguments`: it receives questions, strings, and sends an
            answer to each, until the pipe is closed. A function of a module, which is imported there.
        arguments: more of its arguments.

    Raises:
        RuntimeError: the process ended, or did not answer.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        """The answer to a question."""
        self._pipe.send(what)
        if not self._pipe.poll(PATIENCE_S):
            raise RuntimeError("jax: its process does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("jax: its process ended") from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()
