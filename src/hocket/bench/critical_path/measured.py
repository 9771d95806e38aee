"""The experiment on devices that are there: whole training steps, contenders in turns (`hocket.bench.turns`).

On cores (``--device cpu``) streams are lanes. On a GPU (``--device cuda``) a step is timed from an idle device to an
idle device, so what overlaps across the step's end does not count in its favour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hocket import zoo
from hocket.bench.critical_path.memory import peaks_on_cores
from hocket.bench.turns import in_turns
from hocket.capture.captured import Captured, capture_step
from hocket.execute.lanes import Executor
from hocket.grounds import Cores, Ground, Streams
from hocket.ir import Costs, Machine, Timeline
from hocket.job import Job
from hocket.plan import plan
from hocket.plan.critical_path import METHODS

__all__ = ["on_cores", "on_gpu"]

# What two cores train in a second or less.
ON_CORES = {"lenet": (16, 64), "resnet18": (2,), "googlenet": (2,), "alexnet": (8,)}
# TurboDL's networks, at a batch that leaves room on a GPU of today and at one that does not.
ON_GPU = {
    "lenet": (64, 1024),
    "alexnet": (8, 128),
    "caffenet": (16, 256),
    "vgg16": (4, 100),
    "googlenet": (2, 32),
    "resnet18": (2, 32),
    "resnet50": (2, 32),
    "resnet152": (2, 18),
}
PROFILE_RUNS = 5


def on_cores(*, quick: bool = False, rounds: int = 6, block: int = 3) -> dict[str, Any]:
    """Eager, native serial, `concurrency` and `critical-path` on this machine's cores.

    Returns:
        ``networks``: by label the times of each contender, the speedup over eager, and ``to_concurrency``, which is the
        time of critical-path's plan over that of concurrency's; ``geomean`` of these; and ``memory``: see
        `hocket.bench.critical_path.memory`.
    """
    ground = Cores(Machine.here(), "auto")
    rows = {}
    for name, sizes in list(ON_CORES.items())[: 2 if quick else None]:
        for size in sizes:
            job, captured, costs = _profiled(name, size, ground, "cpu")
            contenders: dict[str, Callable[[Any], Any]] = {"eager": job.step}
            for label in ("serial", "concurrency", "critical-path"):
                made = plan(captured.graph, costs, ground.machine, planner=label)
                contenders[label] = ground.lanes(captured, made)
            rows[f"{name}/{size}"] = row = _row(contenders, job, rounds, block)
            row["to_concurrency"] = row["median_ms"]["critical-path"] / row["median_ms"]["concurrency"]
            row["memory"] = peaks_on_cores(name, size, plan(captured.graph, costs, ground.machine, "critical-path"))
    return {
        "cores": ground.machine.cores,
        "networks": rows,
        "geomean": {"to_concurrency": _geomean(row["to_concurrency"] for row in rows.values())},
    }


def on_gpu(*, quick: bool = False, rounds: int = 5, block: int = 10) -> dict[str, Any]:
    """Every way of running a step on the current CUDA device.

    Contenders: ``eager``; ``graph``: one stream as a CUDA graph, which the others are held against; ``compile``:
    `torch.compile` with ``mode="reduce-overhead"``; ``layers``, ``asynchronous`` and ``full``: see the package.

    Returns:
        ``gpu``; ``networks``: by label the times, ``speedup`` over ``graph``, and what was planned; ``geomean`` of the
        speedups at the smaller and at the larger batch of each network.

    Raises:
        ExecutionError: there is no CUDA device.
    """
    ground = Streams(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    rows = {}
    for name, sizes in list(ON_GPU.items())[: 3 if quick else None]:
        for size in sizes:
            job, captured, costs = _profiled(name, size, ground, "cuda")
            contenders: dict[str, Callable[[Any], Any]] = {"eager": _settled(job.step, ground)}
            lanes = {}
            for count, label in enumerate(("graph", "layers", "asynchronous", "full")):
                made = plan(captured.graph, costs, ground.machine, planner="critical-path", methods=METHODS[:count])
                lanes[label] = len(made.lanes)
                contenders[label] = _settled(ground.lanes(captured, made), ground)
            contenders["compile"] = _settled(_compiled(name, size), ground)
            rows[f"{name}/{size}"] = row = _row(contenders, job, rounds, block)
            row["speedup"] = {label: row["median_ms"]["graph"] / ms for label, ms in row["median_ms"].items()}
            row["lanes"] = lanes
            torch.cuda.empty_cache()
    small = [rows[f"{name}/{sizes[0]}"] for name, sizes in ON_GPU.items() if f"{name}/{sizes[0]}" in rows]
    large = [rows[f"{name}/{sizes[-1]}"] for name, sizes in ON_GPU.items() if f"{name}/{sizes[-1]}" in rows]
    return {
        "gpu": ground.machine.note,
        "torch": torch.__version__,
        "networks": rows,
        "geomean": {
            batch: {label: _geomean(row["speedup"][label] for row in group) for label in group[0]["speedup"]}
            for batch, group in (("small", small), ("large", large))
        },
    }


def _profiled(name: str, size: int, ground: Ground, device: str) -> tuple[Job, Captured, Costs]:
    """A job, its captured step (convolutions' backward taken apart), and what its ops take."""
    job = zoo.load(name, batch_size=size, device=device)
    job.step(job.batch(0))
    captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
    measured: dict[str, list[Timeline]] = {}
    for key, lanes in ground.profilers(captured):
        for run in range(PROFILE_RUNS + 1):
            lanes(job.batch(run))
            if run:
                measured.setdefault(key, []).append(lanes.timeline())
        lanes.close()
    return job, captured, ground.costs(captured, measured)


def _settled(step: Callable[[Any], Any], ground: Ground) -> Callable[[Any], Any]:
    def settled(batch: Any) -> Any:
        result = step(batch)
        ground.settle()
        return result

    return settled


def _compiled(name: str, size: int) -> Callable[[Any], Any]:
    job = zoo.load(name, batch_size=size, device="cuda")
    for model in job.models:
        # Not `model.compile()`: in torch 2.13 it leaves the call as it was and compiles nothing, without a word.
        model.forward = torch.compile(model.forward, mode="reduce-overhead")
    return job.step


def _row(contenders: dict[str, Callable[[Any], Any]], job: Job, rounds: int, block: int) -> dict[str, Any]:
    found = in_turns(contenders, job.batch, rounds=rounds, block=block)
    medians = {label: turns.median_ms for label, turns in found.items()}
    row: dict[str, Any] = {
        "median_ms": medians,
        "over_eager": {label: medians["eager"] / ms for label, ms in medians.items()},
        "contenders": {label: turns.summary() for label, turns in found.items()},
    }
    for step in contenders.values():
        if isinstance(step, Executor):
            step.close()
    return row


def _geomean(values: Iterable[float]) -> float:
    found = list(values)
    return math.exp(sum(map(math.log, found)) / len(found)) if found else float("nan")
