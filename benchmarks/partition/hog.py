"""A hog beside one rank: ``python -m benchmarks partition --hog``.

Two ranks, each on a core of its own, train a model whose branches they divide. After some steps a program that never
sleeps starts on the core of rank 1. In one job ops may move, in the other they may not: what the hog costs is taken
from the other one, what assistants win back from both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.bench import Save, table_of, unsaved
from benchmarks.ranks import heard, join_job, started
from hocket.distributed.stages.partitioned import stages
from hocket.errors import InputError

RANKS = 2
# Steps: until caches and clocks are as they stay, without the hog, until assistants must have acted, and after that.
WARM_UP, IDLE, REACTION, AFTER = 10, 20, 20, 200
# The last steps of which the time without moves is taken.
HOGGED = 30
EVERY_STEPS = 5
TIMEOUT_S = 120.0


class Branches(nn.Module):
    """Equal branches that meet at the end: any number of them may be on either rank."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(count)]
        self.branches = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def run(
    *, batch_size: int = 96, branches: int = 24, width: int = 512, after: int = AFTER, save: Save = unsaved
) -> dict[str, Any]:
    """The job without moves, then the one with them.

    Raises:
        InputError: fewer than two cores, or a rank failed. Says why.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise InputError(f"hog: expected {RANKS} cores, and this process may use {len(cores)}")
    size = (batch_size, branches, width)
    result: dict[str, Any] = {
        "model": f"{branches} branches of two layers of width {width}, batch {batch_size}, SGD with momentum",
        "every_steps": EVERY_STEPS,
    }
    for label, every_steps, steps in (("fixed", 0, HOGGED), ("moving", EVERY_STEPS, REACTION + after)):
        result[label] = _job(cores, size, every_steps, steps)
        save(result)
    result["summary"] = summary_of(result["fixed"], result["moving"])
    return result


def summary_of(fixed: dict[str, Any], moving: dict[str, Any]) -> dict[str, Any]:
    """Summarise the cost of the hog in the job without moves, the part of it that the one with moves wins back."""
    since = moving["hog_from"]
    without_us = median(fixed["steps_us"][WARM_UP : fixed["hog_from"]])
    hogged_us = median(fixed["steps_us"][fixed["hog_from"] :])
    later_us = median(moving["steps_us"][since + REACTION :])
    own_us = median(moving["steps_us"][WARM_UP:since])
    lost = hogged_us / without_us
    units = [(each["step"] - since, each["units"]) for each in moving["migrations"]]
    return {
        "idle_us": without_us,
        "hogged_us": hogged_us,
        "recovered_us": later_us,
        "hogged_over_idle": lost,
        "recovered_over_idle": later_us / own_us,
        # Each job over its own steps without the hog: a machine is not as fast an hour later.
        "won_back": (lost - later_us / own_us) / (lost - 1.0),
        "units_moved_before_the_hog": sum(units for step, units in units if step < 0),
        "units_moved_in_20_steps": sum(units for step, units in units if 0 <= step < REACTION),
        "units_moved_later": sum(units for step, units in units if step >= REACTION),
        "steps_later": len(moving["steps_us"]) - since - REACTION,
    }


def _job(cores: list[int], size: tuple[int, int, int], every_steps: int, steps: int) -> dict[str, Any]:
    """Both ranks through all steps. The hog starts after those without it."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=TIMEOUT_S))
    places = [(rank, cores[rank], store.port, size, every_steps, steps) for rank in range(RANKS)]
    hog = None
    try:
        with started(_rank, places) as pipes:
            for pipe in pipes:
                heard(pipe)
            hog = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            os.sched_setaffinity(hog.pid, {cores[1]})
            for pipe in pipes:
                pipe.send("hog")
            first, _ = [heard(pipe) for pipe in pipes]
            return dict(first)
    finally:
        if hog is not None:
            hog.kill()
            hog.wait()


def _rank(pipe: Any, rank: int, core: int, port: int, size: tuple[int, int, int], every_steps: int, steps: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
        join_job(rank, RANKS, "127.0.0.1", port)
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        pipe.send((_trained(pipe, size, every_steps, steps), None))
    except Exception as error:  # noqa: BLE001  # raised by who asked
        pipe.send((None, InputError(f"hog: rank {rank}: {type(error).__name__}: {error}")))


def _trained(pipe: Any, size: tuple[int, int, int], every_steps: int, steps: int) -> dict[str, Any]:
    batch_size, branches, width = size
    torch.manual_seed(0)
    model = Branches(branches, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(batch_size, width)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    steps_us: list[float] = []
    looks: dict[int, Any] = {}

    def take(count: int) -> None:
        for _ in range(count):
            begin_s = time.perf_counter()
            fast(batch)
            steps_us.append((time.perf_counter() - begin_s) * 1e6)
            if every_steps and fast.steps % every_steps == 1:
                looks[fast.steps - 1] = [(share.compute, share.slowdown) for share in fast.shares]

    with stages(step, model, optimizer, budget_s=3.0, rebalance=every_steps, timeout_s=TIMEOUT_S) as fast:
        take(WARM_UP + IDLE)
        pipe.send((None, None))
        pipe.recv()
        hog_from = fast.steps
        take(steps)
        migrations = [
            {"step": each.step, "units": 0 if each.refused else len(each.moved), "text": str(each)}
            for each in fast.migrations
        ]
    return {"hog_from": hog_from, "steps_us": steps_us, "migrations": migrations, "looks": looks}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    found = result["summary"]
    times_us = {label: found[f"{label}_us"] for label in ("idle", "hogged", "recovered")}
    rows = {label: {"us": us, "to_idle": us / times_us["idle"]} for label, us in times_us.items()}
    columns = {"steps": "{name}", "median us": "{us:.0f}", "to idle": "{to_idle:.2f}"}
    yield table_of(f"a hog on the core of rank 1: {result['model']}", columns, rows)
    yield (
        "won back: {won_back:.2f}; units moved before the hog {units_moved_before_the_hog}, in 20 steps "
        "{units_moved_in_20_steps}, in the {steps_later} after {units_moved_later}"
    ).format_map(found)
    yield from (each["text"] for each in result["moving"]["migrations"])
