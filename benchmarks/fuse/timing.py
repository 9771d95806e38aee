"""Steps of several contenders, timed in blocks that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch

from benchmarks.fuse import beside
from benchmarks.fuse.targets import Step
from hocket.errors import InputError

SHORT_S = 2.0  # short steps are taken as often as fits in this time,
MAX_STEPS = 300  # or so often
MAX_UNSETTLED = 64  # steps before those that count, by which choices are made
BLOCK = 4  # counted steps of one contender after another


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("bench fuse: device: expected one that is there, got 'cuda', and torch sees no GPU")


def timed(in_turn: Mapping[str, Callable[[], None]], device: str, steps: int) -> dict[str, list[float]]:
    """Time steps in ms, in blocks that alternate forth and back, so that none always follows the same contender.

    The first step of a block finds the caches and the heap as another contender left them, and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in in_turn}
    turn_s = 0.0
    # First calls time what they choose from, so no other contender may start, compile or keep threads meanwhile.
    for step in in_turn.values():
        if isinstance(step, Step) and step.seconds is not None:
            step.seconds()
        close(step)
    for _ in range(beside.WARM_UP):
        turn_s = sum([took_s(step, device) for step in in_turn.values()])
    for step in in_turn.values():
        for _ in range(MAX_UNSETTLED):
            if not isinstance(step, Step) or step.is_settled():
                break
            took_s(step, device)
        close(step)
    wanted = max(steps, min(MAX_STEPS, int(SHORT_S / turn_s)))
    for first in range(0, wanted, BLOCK):
        for name in list(in_turn)[:: 1 if first // BLOCK % 2 else -1]:
            took_s(in_turn[name], device)
            for _ in range(first, min(wanted, first + BLOCK)):
                times[name].append(took_s(in_turn[name], device) * 1e3)
            close(in_turn[name])
    return times


def close(step: Callable[[], None]) -> None:
    """End a step's lanes, of whose threads libgomp would think while others run (see `bench.turns`)."""
    if isinstance(step, Step):
        step.close()


def took_s(step: Callable[[], None], device: str) -> float:
    if isinstance(step, Step) and step.seconds is not None:
        return step.seconds()
    start = perf_counter()
    step()
    beside.settle(device)
    return perf_counter() - start


def row_of(times_ms: list[float]) -> dict[str, Any]:
    lower, middle, upper = quantiles(times_ms, n=4) if len(times_ms) > 1 else times_ms * 3
    return {"step_ms": middle, "quartiles_ms": [lower, upper], "steps": len(times_ms)}
