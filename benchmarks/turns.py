"""Contenders in turns: every one gets blocks of steps, round after round, in one process or each in its own.

On a shared machine only ratios of what ran at nearly the same time mean anything, so contenders alternate, forth and
back. A block is a few steps long, and its first steps are not counted: they find the caches, the threads and the heap
as the one before left them, which a training run would not.

libgomp counts the threads of all teams in a process, and where they are more than the cores its idle threads hardly
spin any more, so the teams of several contenders slow each other down, eager most of all. Whole steps are therefore
compared in a process for each, as a training has (`Elsewhere`). Of contenders that share a process the lanes are closed
after each block.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.ranks import heard, started

PATIENCE_S = 5.0  # for a process to end by itself


class Elsewhere:
    """A contender in a process of its own. `said` is what `answer` said about it there, `loss` that of its last step.

    The function `serve` is called there with the arguments, behind an end of the pipe that it gives to `answer`.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self._stack = ExitStack()
        (self._pipe,) = self._stack.enter_context(started(serve, [arguments], daemon=True))
        self.said: dict[str, Any] = heard(self._pipe)
        self.loss: float | None = None

    def times_s(self, count: int) -> list[float]:
        """Make `count` steps in a row, and return what each took there."""
        self._pipe.send(count)
        times_s, self.loss = heard(self._pipe)
        return times_s

    def end(self) -> None:
        """End the process, which gives back what it shares with others, or is killed."""
        with suppress(BrokenPipeError):  # it has ended
            self._pipe.send(None)
            self._pipe.poll(PATIENCE_S)  # until its end is closed
        self._stack.close()


def answer(
    pipe: Any,
    said: Mapping[str, Any],
    step: Callable[[Any], Any],
    batch: Callable[[int], Any],
    loss_of: Callable[[Any], Any] = lambda result: None,
) -> None:
    """Say what is known about a contender, and then make the steps that are asked for.

    Steps in a row are timed where they are made: what the pipe takes is no part of them, nor what it takes threads that
    fell asleep between two questions to wake up.
    """
    os.dup2(2, 1)  # what others print would be in the middle of the bench's own output
    pipe.send((dict(said), None))
    number = 0
    while (count := pipe.recv()) is not None:
        times_s = []
        for _ in range(count):
            data = batch(number)
            start = perf_counter()
            result = step(data)
            times_s.append(perf_counter() - start)
            number += 1
        pipe.send(((times_s, loss_of(result)), None))


def in_turns(
    contenders: Mapping[str, Any],
    batch: Callable[[int], Any] = lambda number: None,
    *,
    rounds: int,
    block: int,
    warm_up: int = 2,
    settle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Return the milliseconds of the counted steps of each contender, in `rounds` blocks of `block` steps.

    A contender that runs `Elsewhere` has a method `times_s`. A method `close` ends the lanes after a block. `settle`
    waits for what a step has begun.
    """
    found: dict[str, list[float]] = {label: [] for label in contenders}
    number = 0
    for turn in range(rounds):
        for label in list(contenders)[:: -1 if turn % 2 else 1]:
            step = contenders[label]
            if (elsewhere := getattr(step, "times_s", None)) is not None:
                found[label] += [took_s * 1e3 for took_s in elsewhere(warm_up + block)[warm_up:]]
                continue
            gc.collect()
            for position in range(-warm_up, block):
                data = batch(number)
                number += 1
                start = clock()
                step(data)
                settle()
                if position >= 0:
                    found[label].append((clock() - start) * 1e3)
            if (close := getattr(step, "close", None)) is not None:
                close()
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Let ops have one thread in the block."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def summaries(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the summary of each contender, and its speedup over eager."""
    ordered = {label: sorted(times_ms) for label, times_ms in found.items()}
    return {
        "contenders": {
            label: {
                "median_ms": median(times_ms),
                "p10_ms": times_ms[len(times_ms) // 10],
                "p90_ms": times_ms[len(times_ms) * 9 // 10],
                "steps": len(times_ms),
            }
            for label, times_ms in ordered.items()
        },
        "speedup": {label: median(ordered["eager"]) / median(times_ms) for label, times_ms in ordered.items()},
    }


def title(result: Mapping[str, Any]) -> str:
    """Return the title of a table of such speedups."""
    return f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"
