"""Steps of several contenders, timed in blocks that take turns.

Models side by side, and the measurement of memory, are in processes of their own.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.fuse.targets import BACKENDS, TARGETS, Step, Target, Training, step_of
from benchmarks.ranks import heard, in_process, peak_bytes, resident_bytes, set_back_peak, started
from benchmarks.turns import in_turns
from hocket import optim as fused_optim
from hocket.fusion import fuse

WARM_UP = 2


def settle(device: str) -> None:
    """Wait for all that was begun."""
    if device == "cuda":
        torch.cuda.synchronize()


def side_by_side(
    target: Target, size: int, device: str, steps: int, training: Training, *, patience_s: float = 300.0
) -> float:
    """Seconds that a step of `size` processes takes, each training a model, from a common start to the last end.

    Raises:
        InputError: they took longer, or one of them failed.
    """
    with started(_one_of_many, [(target, seed, device, steps, training) for seed in range(size)]) as pipes:
        for pipe in pipes:
            heard(pipe, patience_s)
        before = perf_counter()
        for pipe in pipes:
            pipe.send("start")
        for pipe in pipes:
            heard(pipe, patience_s)
        return (perf_counter() - before) / steps


def _one_of_many(pipe: Any, target: Target, seed: int, device: str, steps: int, training: Training) -> None:
    torch.set_num_threads(1)  # each has one core to itself, as far as there are cores
    step = step_of("serial", target, 1, device, training, seed)
    for count in (WARM_UP, steps):
        for _ in range(count):
            step()
        settle(device)
        pipe.send((None, None))
        if count == WARM_UP:
            pipe.recv()


def memory_of(name: str, target: Target, size: int, device: str, training: Training) -> float:
    """Peak memory of two steps of a contender, bytes: on a GPU above what is held now, else in a process of its own.

    Raises:
        InputError: that process did not end.
    """
    if device == "cuda":
        return _allocated(name, target, size, training)
    return float(in_process(_grown, name, target, size, training, timeout_s=600.0))


def _allocated(name: str, target: Target, size: int, training: Training) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = step_of(name, target, size, "cuda", training)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def _grown(name: str, target: Target, size: int, training: Training) -> float:
    """The highest that the process grew by since before the models were made, choosing a backend included.

    Libraries and code that are loaded when anything is first trained, or fused, are there before, for each contender:
    they would hide how small a model is.
    """
    x = torch.randn(4, 2, 2)
    small = [nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 2)) for _ in range(2)]
    with training.autocast("cpu"):
        small[0](x).float().sum().backward()
        torch.optim.SGD(small[0].parameters(), lr=0.1, momentum=0.9).step()
        if name in BACKENDS:
            array = fuse(small, backend=BACKENDS[name], shared=True)
            array.losses(nn.functional.mse_loss, x, torch.zeros(4, 2)).backward()
            fused_optim.SGD(array.parameters(), lr=0.1, momentum=0.9).step()
    if name in ("scheduled", "close", "lanes"):
        step_of(name, TARGETS["mlp-32"], 1, "cpu", training)
    set_back_peak()
    before = resident_bytes()
    step = step_of(name, target, size, "cpu", training)
    for _ in range(2):
        step()
    return max(0.0, peak_bytes() - before)


SHORT_S = 2.0  # short steps are taken as often as fits in this time,
MAX_STEPS = 300  # or so often
MAX_UNSETTLED = 64  # steps before those that count, by which choices are made
BLOCK = 4  # counted steps of one contender after another


def timed(in_turn: Mapping[str, Step], device: str, steps: int) -> dict[str, list[float]]:
    """Time steps in ms, in blocks that take turns, once all choices are made."""
    # First calls time what they choose from, so no other contender may start, compile or keep threads meanwhile.
    for step in in_turn.values():
        if step.times_s is not None:
            step.times_s(1)
        step.close()
    for _ in range(WARM_UP):
        turn_s = sum([took_s(step, device) for step in in_turn.values()])
    for step in in_turn.values():
        for _ in range(MAX_UNSETTLED):
            if step.is_settled():
                break
            took_s(step, device)
        step.close()
    wanted = max(steps, min(MAX_STEPS, int(SHORT_S / turn_s)))
    rounds = math.ceil(wanted / BLOCK)
    return in_turns(in_turn, rounds=rounds, block=BLOCK, warm_up=1, settle=lambda: settle(device))


def took_s(step: Step, device: str) -> float:
    if step.times_s is not None:
        return step.times_s(1)[0]
    start = perf_counter()
    step()
    settle(device)
    return perf_counter() - start
