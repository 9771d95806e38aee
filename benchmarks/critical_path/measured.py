"""The experiment on devices that are there: whole training steps, contenders in turns (`benchmarks.turns`).

On cores (``--device cpu``) streams are lanes. On a GPU (``--device cuda``) a step is timed from an idle device to an
idle device, so what overlaps across the step's end does not count in its favour.

Peak memory is what a process grew by since before the model was made, at its highest while steps are run eagerly, or by
plan, in one of its own. What loading torch's tracer and Hocket takes is stated apart: both processes capture and run a
step of one layer before the model is made.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from benchmarks.bench import Budget, Save, unsaved
from benchmarks.contenders import compiled_step
from benchmarks.ranks import in_process, is_measurable, peak_bytes, resident_bytes, set_back_peak
from benchmarks.turns import in_turns, summaries
from hocket import zoo
from hocket.backends import Backend, CpuBackend, CudaBackend, StreamBackend
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.streams import CudaDevice
from hocket.ir import Costs, Machine, Plan
from hocket.job import Job
from hocket.planning import plan
from hocket.planning.critical_path import METHODS
from hocket.profiling.tracer import serial_plan
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step

# Sizes that two cores train in a second or less.
ON_CORES = {"lenet": (16, 64), "resnet18": (2,), "googlenet": (2,), "alexnet": (8,)}
# At a batch that leaves room on a GPU of today and at one that does not. Those that need no further package come first:
# three of them for their many small ops, then TurboDL's networks.
ON_GPU = {
    "lenet": (64, 1024),
    "transformer": (8, 128),
    "lstm-cells": (32, 512),
    "dcgan": (16, 128),
    "googlenet": (2, 32),
    "alexnet": (8, 128),
    "caffenet": (16, 256),
    "vgg16": (4, 100),
    "resnet18": (2, 32),
    "resnet50": (2, 32),
    "resnet152": (2, 18),
}
UNLIMITED = 1e15  # bytes
COMPILED = {"compile": "reduce-overhead", "autotuned": "max-autotune"}  # by contender, the mode


def on_cores(
    *, quick: bool = False, rounds: int = 6, block: int = 3, budget_s: float | None = None, save: Save = unsaved
) -> dict[str, Any]:
    """Eager, native serial, `concurrency` and `critical-path` on this machine's cores.

    ``to_concurrency`` is the time of critical-path's plan over that of concurrency's.
    """
    backend = CpuBackend(Machine.here(), "auto")
    budget = Budget(budget_s)
    rows: dict[str, Any] = {}
    result: dict[str, Any] = {"networks": rows, "left_out": budget.left_out}
    for name, sizes in list(ON_CORES.items())[: 2 if quick else None]:
        for size in sizes:
            with budget.item(f"{name}/{size}", units=_layers(name)) as begun:
                if begun:
                    rows[f"{name}/{size}"] = _cores_row(name, size, backend, rounds, block)
            result["geomean"] = _geomeans({"to_concurrency": [row["to_concurrency"] for row in rows.values()]})
            save(result)
    return result


def _cores_row(name: str, size: int, backend: Backend, rounds: int, block: int) -> dict[str, Any]:
    job, captured, costs = profiled_job(name, size, backend, "cpu")
    contenders: dict[str, Callable[[Any], Any]] = {"eager": job.step}
    for label in ("serial", "concurrency", "critical-path"):
        contenders[label] = backend.executor(captured, plan(captured.graph, costs, backend.machine, planner=label))
    row = _row(contenders, job, rounds, block)
    row["to_concurrency"] = row["median_ms"]["critical-path"] / row["median_ms"]["concurrency"]
    row["memory"] = peaks_on_cores(name, size, plan(captured.graph, costs, backend.machine, "critical-path"))
    return row


def on_gpu(
    *, quick: bool = False, rounds: int = 5, block: int = 10, budget_s: float | None = None, save: Save = unsaved
) -> dict[str, Any]:
    """Every way of running a step on the current CUDA device.

    Contenders: ``eager``; ``graph``: one stream as a CUDA graph, which the others are held against; ``eager graph``:
    the user's own step captured by torch; ``compile`` and ``autotuned``: `torch.compile` with ``reduce-overhead`` and
    ``max-autotune``, the optimizer's step compiled, too; ``layers``, ``asynchronous`` and ``full``: see the package.
    Each of them, and each network, that fails is named in ``left_out`` and costs itself alone.

    Raises:
        ExecutionError: there is no CUDA device.
    """
    backend = CudaBackend(CudaDevice())
    networks = dict(list(ON_GPU.items())[: 3 if quick else None])
    return on_streams(backend, "cuda", networks, rounds, block, Budget(budget_s), save)


def on_streams(
    backend: StreamBackend,
    device: str,
    networks: Mapping[str, tuple[int, int]],
    rounds: int,
    block: int,
    budget: Budget,
    save: Save,
) -> dict[str, Any]:
    """`on_gpu` on any backend: a test has no GPU."""
    rows: dict[str, dict[str, Any]] = {}
    over_graph: dict[str, dict[str, list[float]]] = {"small": {}, "large": {}}
    result: dict[str, Any] = {"gpu": backend.machine.note, "networks": rows, "left_out": budget.left_out}
    for place, found in enumerate(over_graph.values()):
        for name, sizes in networks.items():
            label = f"{name}/{sizes[place]}"
            with budget.item(label, units=_layers(name), spared=Exception) as begun:
                if begun:
                    rows[label] = _streams_row(name, sizes[place], backend, device, rounds, block, budget)
                    for contender, speedup in rows[label].get("speedup", {}).items():
                        found.setdefault(contender, []).append(speedup)
            gc.collect()
            torch.cuda.empty_cache()
            result["geomean"] = {batch: _geomeans(speedups) for batch, speedups in over_graph.items()}
            save(result)
    return result


def _streams_row(
    name: str, size: int, backend: StreamBackend, device: str, rounds: int, block: int, budget: Budget
) -> dict[str, Any]:
    job, captured, costs = profiled_job(name, size, backend, device)
    lanes: dict[str, Executor] = {}

    def planned(label: str, num_methods: int) -> Callable[[Any], Any]:
        methods = METHODS[:num_methods]
        limit = {} if methods in ((), METHODS) else {"peak_limit_bytes": UNLIMITED}  # as in the paper
        made = plan(captured.graph, costs, backend.machine, planner="critical-path", methods=methods, **limit)
        lanes[label] = backend.executor(captured, made)
        return lanes[label]

    makers: dict[str, Callable[[], Callable[[Any], Any]]] = {"eager": lambda: job.step}
    for count, label in enumerate(("graph", "layers", "asynchronous", "full")):
        makers[label] = partial(planned, label, count)
    makers["eager graph"] = lambda: _eager_graph(name, size, backend, device)
    for label, mode in COMPILED.items():
        makers[label] = partial(_compiled, name, size, device, mode)
    contenders: dict[str, Callable[[Any], Any]] = {}
    for label, make in makers.items():
        what = f"{name}/{size}: {label}"
        kind, share = ("compile", 1 / 3) if label in COMPILED else ("contender", 1.0)
        with budget.item(what, kind=kind, units=_layers(name), share=share, spared=Exception) as begun:
            if begun:
                step = _settled(make(), backend)
                for number in range(2):
                    step(job.batch(number))
                if label in lanes and lanes[label].failure:
                    raise ExecutionError(f"no CUDA graph: {lanes[label].failure}")
                contenders[label] = step
        if label in lanes:
            lanes[label].close()  # so that graphs that wait for their turn hold no memory
    row = _row(contenders, job, rounds, block)
    if "graph" in contenders:
        row["speedup"] = {label: row["median_ms"]["graph"] / ms for label, ms in row["median_ms"].items()}
    row["lanes"] = {label: len(lanes[label].plan.lanes) for label in contenders if label in lanes}
    return row


def _eager_graph(name: str, size: int, backend: StreamBackend, device: str) -> Callable[[Any], Any]:
    """The user's own step as one CUDA graph, in eager's order on one stream (the baseline of Nimble)."""
    job = zoo.load(name, batch_size=size, device=device)
    leaves, spec = tree_flatten(job.batch(0))
    fixed = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    batch, streams = tree_unflatten(fixed, spec), backend.device
    warm_up = streams.stream(0)
    for _ in range(3):
        streams.launch(warm_up, lambda: job.step(batch))
    streams.synchronize()
    replay = streams.graph(lambda: streams.launch(streams.current(), lambda: job.step(batch)))

    def step(batch: Any) -> None:
        for leaf, given in zip(fixed, tree_leaves(batch), strict=True):
            if isinstance(leaf, torch.Tensor):
                leaf.copy_(given)
        replay()

    return step


def profiled_job(name: str, size: int, backend: Backend, device: str) -> tuple[Job, Captured, Costs]:
    """A job, its captured step (convolutions' backward taken apart), and what its ops take."""
    job = zoo.load(name, batch_size=size, device=device)
    job.step(job.batch(0))
    captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
    profiling, number = backend.profiled(captured), 0
    while True:
        try:
            next(profiling)(job.batch(number))
        except StopIteration as done:
            return job, captured, done.value
        number += 1


def _settled(step: Callable[[Any], Any], backend: Backend) -> Callable[[Any], Any]:
    def settled(batch: Any) -> Any:
        result = step(batch)
        backend.synchronize()
        return result

    return settled


def _compiled(name: str, size: int, device: str, mode: str) -> Callable[[Any], Any]:
    step, report = compiled_step(zoo.load(name, batch_size=size, device=device), update=True, last=False, mode=mode)
    if step is None:
        raise ExecutionError(report["failed"])
    return step


def _row(contenders: dict[str, Callable[[Any], Any]], job: Job, rounds: int, block: int) -> dict[str, Any]:
    found = summaries(in_turns(contenders, job.batch, rounds=rounds, block=block))
    return {
        "median_ms": {label: each["median_ms"] for label, each in found["contenders"].items()},
        "over_eager": found["speedup"],
        "contenders": found["contenders"],
    }


def _layers(name: str) -> int:
    """Count the layers of a network, by which its duration is guessed."""
    try:
        with torch.device("meta"):
            job = zoo.load(name, batch_size=1, num_batches=1)
    except Exception:  # noqa: BLE001  # a package that is missing: so it is when the network is measured
        return 1
    return sum(1 for model in job.models for _ in model.modules())


def _geomeans(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the geometric means of all lists that have values: JSON has no NaN."""
    return {name: geometric_mean(found) for name, found in values.items() if found}


WARM_UP = 3
STEPS = 5
TIMEOUT_S = 300.0


def peaks_on_cores(name: str, batch_size: int, plan: Plan) -> dict[str, float]:
    """Peaks of a zoo model's step, eager and by plan, and their ratio. Empty where the system does not tell."""
    if not is_measurable():
        return {}
    eager, _ = in_process(_peak_bytes, name, batch_size, None, timeout_s=TIMEOUT_S)
    planned, loading = in_process(_peak_bytes, name, batch_size, str(plan), timeout_s=TIMEOUT_S)
    found = {"eager_bytes": eager, "plan_bytes": planned, "ratio": planned / eager, "loading_bytes": loading}
    if plan.peak_bytes and plan.eager_peak_bytes:
        found["predicted_ratio"] = plan.peak_bytes / plan.eager_peak_bytes
    return found


def _peak_bytes(name: str, batch_size: int, plan: str | None) -> tuple[float, float]:
    bare = resident_bytes()
    _run_one_layer()
    before = resident_bytes()
    job = zoo.load(name, batch_size=batch_size)
    step = job.step
    if plan is not None:
        job.step(job.batch(0))
        captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
        step = executor(captured, Plan.parse(plan), Machine.here())
    for number in range(WARM_UP):
        step(job.batch(number))
    set_back_peak()
    for number in range(STEPS):
        step(job.batch(number))
    return peak_bytes() - before, before - bare


def _run_one_layer() -> None:
    job, machine = zoo.load("mlp", depth=1, width=2, batch_size=2), Machine.here()
    job.step(job.batch(0))
    captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
    lanes = executor(captured, serial_plan(captured, 1, machine), machine)
    for number in range(2):
        lanes(job.batch(number))
    lanes.close()
