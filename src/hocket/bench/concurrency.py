"""Every way of running a step on the cores of this machine, side by side: ``hocket bench concurrency``.

Contenders, all in one process, each on a twin of the same job, in turns, medians with spread:

- ``eager``: torch as recommended, threads = cores; ``eager_best``: the best number of threads for all ops;
- ``compile``: `torch.compile` of the model, with what it really compiled: graphs, breaks, recompiles;
- ``uniform_best``: the best of every inter x intra combination, ops in program order on equal native lanes (the
  paper's manual optimisation);
- ``serial``: native lanes, one lane of all cores, program order;
- ``s1``, ``s12``, ``s123``: the paper's strategies, added in turn (`hocket.plan.concurrency`);
- ``all``: what `hocket.schedule` kept (its guard included).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hocket import zoo
from hocket.capture.captured import Captured, capture_step
from hocket.errors import HocketError
from hocket.execute import executor
from hocket.execute.lanes import synchronisation
from hocket.ir import Costs, Lane, Machine, Plan
from hocket.job import Job
from hocket.plan import bounds, plan
from hocket.profile import profile
from hocket.session import Schedule, schedule

__all__ = ["LARGE", "SMALL", "measure", "run"]

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {},
    "transformer": {"batch_size": 4},
    "lstm-cells": {"batch_size": 20},
    "resnet20": {"batch_size": 4},
}
LARGE: dict[str, dict[str, Any]] = {
    "resnet20": {"batch_size": 64},
    "densenet40": {"batch_size": 32},
    "inception-v3": {"batch_size": 4},
    "resnet50": {"batch_size": 8},
    "dcgan": {"batch_size": 64},
}


def run(*, quick: bool = False, compiled: bool = True, rounds: int | None = None) -> dict[str, Any]:
    """Measure the small-op steps, and unless `quick` the large-op steps."""
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": Machine.here().cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "small": {},
        "large": {},
    }
    for group, targets in (("small", SMALL), ("large", {} if quick else LARGE)):
        for name, size in targets.items():
            label = f"{name}/{size['batch_size']}" if size else name
            result[group][label] = measure(
                name, size, compiled=compiled, rounds=rounds or (30 if group == "small" else 7)
            )
        found = [row["speedup"]["all"] for row in result[group].values()]
        if found:
            result[f"{group}_geomean_speedup"] = math.exp(sum(map(math.log, found)) / len(found))
    return result


def measure(name: str, size: dict[str, Any], *, compiled: bool = True, rounds: int = 20) -> dict[str, Any]:
    """One target: medians in milliseconds, ratios to eager, the bound, and what `torch.compile` did."""
    machine = Machine.here()
    cores = machine.cores
    usual = torch.get_num_threads()
    contenders: dict[str, Callable[[Any], Any]] = {}
    eager = zoo.load(name, **size)
    contenders["eager"] = eager.step
    for threads in range(1, cores):
        contenders[f"eager_{threads}"] = _at_width(zoo.load(name, **size).step, threads, usual)
    notes: dict[str, Any] = {}
    if compiled:
        contenders["compile"], notes = _compiled(zoo.load(name, **size))
    captured = _captured(name, size)
    costs = profile(captured, machine=machine, runs=5)
    for lanes in (count for count in range(1, cores + 1) if cores % count == 0):
        width = cores // lanes
        contenders[f"uniform_{lanes}x{width}"] = executor(captured, _in_program_order(captured, lanes, width), machine)
    for label, strategies in (("s1", (1,)), ("s12", (1, 2)), ("s123", (1, 2, 3))):
        made = plan(captured.graph, costs, machine, planner="concurrency", strategies=strategies, lookahead_ms=0.0)
        contenders[label] = executor(captured, made, machine)
    fast_job = zoo.load(name, **size)
    fast = schedule(fast_job.step, fast_job.model, fast_job.optimizer)
    number = 0
    while not fast.decided:
        fast(fast_job.batch(number))
        number += 1
    contenders["all"] = fast
    times = _in_turns(contenders, eager, rounds)
    return _summary(times, captured, costs, machine, fast, notes)


def _summary(
    times: dict[str, list[float]],
    captured: Captured,
    costs: Costs,
    machine: Machine,
    fast: Schedule,
    notes: dict[str, Any],
) -> dict[str, Any]:
    medians = {label: median(values) for label, values in times.items()}
    eager = medians["eager"]
    uniform = {label: value for label, value in medians.items() if label.startswith("uniform_")}
    lower_ms = bounds(captured.graph, costs, machine).lower_us / 1e3
    return {
        "ops": len(captured.graph),
        "median_ms": medians,
        "p10_ms": {label: sorted(values)[len(values) // 10] for label, values in times.items()},
        "p90_ms": {label: sorted(values)[len(values) * 9 // 10] for label, values in times.items()},
        "speedup": {label: eager / value for label, value in medians.items()},
        "uniform_best": min(uniform, key=uniform.__getitem__),
        "lower_bound_ms": lower_ms,
        "to_bound": {label: value / lower_ms for label, value in medians.items()},
        "verdict": str(fast.verdict),
        "why": fast.why,
        "compile": notes,
        "runs": len(times["eager"]),
    }


def _in_turns(contenders: dict[str, Callable[[Any], Any]], job: Job, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {label: [] for label in contenders}
    gc.collect()
    for number in range(rounds + 2):
        batch = job.batch(number)
        for label, step in contenders.items():
            start = perf_counter()
            step(batch)
            if number > 1:
                times[label].append((perf_counter() - start) * 1e3)
    return times


def _at_width(step: Callable[[Any], Any], threads: int, usual: int) -> Callable[[Any], Any]:
    def narrow(batch: Any) -> Any:
        torch.set_num_threads(threads)
        try:
            return step(batch)
        finally:
            torch.set_num_threads(usual)

    return narrow


def _captured(name: str, size: dict[str, Any]) -> Captured:
    job = zoo.load(name, **size)
    job.step(job.batch(0))
    return capture_step(job.step, job.model, job.optimizer, job.batch(0), split=False)


def _in_program_order(captured: Captured, lanes: int, width: int) -> Plan:
    """The ops dealt out in program order, each to the lane that is free first when its data is there."""
    order = captured.graph.order
    dealt: list[list[str]] = [[] for _ in range(lanes)]
    place: dict[str, int] = {}
    for op in order:
        latest = [place[before] for before in captured.graph.predecessors[op]]
        lane = (
            latest[-1]
            if latest and lanes > 1 and len(set(latest)) == 1
            else min(range(lanes), key=lambda n: len(dealt[n]))
        )
        dealt[lane].append(op)
        place[op] = lane
    made = Plan(
        tuple(
            Lane(f"lane{n}", tuple(ops), width=width, cores=tuple(range(n * width, (n + 1) * width)))
            for n, ops in enumerate(dealt)
        ),
        planner="uniform",
    )
    synchronisation(captured.graph, made)
    return made


def _compiled(job: Job) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """The job's step with its models compiled, and what the compiler says it did."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for model in job.models:
        # Not `model.compile()`: in torch 2.13 it leaves the call as it was and compiles nothing, without a word.
        model.forward = torch.compile(model.forward)
    start = perf_counter()
    for number in range(3):
        job.step(job.batch(number))
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"].get("unique_graphs", 0)
    if not graphs:
        raise HocketError(f"torch.compile compiled nothing of {job.name!r}; it is no baseline")
    return job.step, {
        "graphs": graphs,
        "graph_breaks": dict(counters["graph_break"]),
        "recompiles": sum(counters["recompiles"].values()) if "recompiles" in counters else 0,
        "seconds": perf_counter() - start,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the small-op steps")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)")
    parser.add_argument("--rounds", type=int)
    words = parser.parse_args()
    json.dump(run(quick=words.quick, compiled=not words.no_compile, rounds=words.rounds), sys.stdout, indent=1)
