"""Processes of the fuse bench: models side by side, and memory, each in its own."""

from __future__ import annotations

import gc
import multiprocessing
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.fuse.targets import BACKENDS, TARGETS, Target, step_of
from benchmarks.fuse.training import Training
from benchmarks.ranks import in_process, started
from benchmarks.resident import peak_bytes, resident_bytes, set_back_peak
from hocket import optim as fused_optim
from hocket.errors import InputError
from hocket.fusion import fuse

WARM_UP = 2


def settle(device: str) -> None:
    """Wait for all that was begun."""
    if device == "cuda":
        torch.cuda.synchronize()


def side_by_side(
    target: Target,
    size: int,
    device: str,
    steps: int,
    training: Training,
    *,
    patience_s: float = 300.0,
) -> float:
    """Seconds that a step of `size` processes takes, each training a model, from a common start to the last end.

    Args:
        target: what they train.
        size: how many there are.
        device: "cpu" or "cuda".
        steps: counted steps of each.
        training: how they are trained.
        patience_s: how long they may take to begin, and then to end.

    Raises:
        InputError: they took longer, or one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    start, end = context.Barrier(size + 1), context.Barrier(size + 1)
    with started(_one_of_many, [(target, seed, device, steps, training, start, end) for seed in range(size)]):
        try:
            start.wait(timeout=patience_s)
            before = perf_counter()
            end.wait(timeout=patience_s)
        except BrokenBarrierError as error:
            raise InputError(f"not done in {patience_s:.0f} s, or one of the processes failed") from error
        return (perf_counter() - before) / steps


def _one_of_many(
    _: Any, target: Target, seed: int, device: str, steps: int, training: Training, start: Any, end: Any
) -> None:
    try:
        torch.set_num_threads(1)  # each has one core to itself, as far as there are cores
        step = step_of("serial", target, 1, device, training, seed)
        for _ in range(WARM_UP):
            step()
        settle(device)
        start.wait()
        for _ in range(steps):
            step()
        settle(device)
        end.wait()
    except BaseException:  # nobody shall wait for this one
        start.abort()
        end.abort()
        raise


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
