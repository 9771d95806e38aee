"""The cost of the compiling process: its time, and the slowdown of the training beside it.

The step is scheduled first, and then compiled as a schedule compiles it: in a process that gives way to the steps by as
much as their plan asks for, while they run. In turns that process is stopped, for planned steps alone and eager ones.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench import Save, by_target, table_of, unsaved
from benchmarks.contenders import job_of, until_decided
from benchmarks.ranks import in_process
from hocket.autotune.forms import rewritten
from hocket.errors import CaptureError, HocketError
from hocket.job import Job
from hocket.session import Schedule
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.folder import Compiling
from hocket.tracing.compiling.process import CompilingProcess, niceness
from hocket.tracing.state import inventory
from hocket.tracing.variants import compiled_from, compiled_rewrites_of

TARGETS = ("mlp", "lstm-cells", "resnet20", "densenet40")
# Steps may take this multiple of eager's time beside the compiler.
BAR = 1.3
# A turn takes so long, or five steps.
TURN_S, TURN_STEPS = 1.0, 5
FIRST_TURNS = 3
TIMEOUT_S = 600.0


def run(targets: tuple[str, ...] = TARGETS, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target (see `measure`)."""
    return by_target(targets, measure, save)


def measure(target: str) -> dict[str, Any]:
    """One target, in the last of its forms that are compiled: of images, with channels last.

    Medians of eager steps and of scheduled ones while the compiler is stopped and while it runs, ratios of them and of
    their means, which single long steps move, the compiler's time and part of the cores, and ``cached_s``, what a
    second process takes to have the compiled form that is kept, once it has captured the step.
    """
    eager, job = _trained(target), _trained(target)
    captured = _to_compile(_trained(target))
    times: dict[str, list[float]] = {"eager": [], "alone": [], "beside": []}
    compile_s, turns = 0.0, 0
    fast = Schedule(job.step, job.model, job.optimizer, numerics="close")
    with closing(fast), tempfile.TemporaryDirectory() as folder:
        until_decided(fast, job)
        for _ in range(FIRST_TURNS):  # with the first audits; a schedule waits longer before it compiles
            _turn(fast, job, [], lambda: False)
        compiling = Compiling(captured, Path(folder), threads=torch.get_num_threads())
        nice = niceness(fast.decision.ahead)
        process = CompilingProcess(nice)
        spent_s = _children_s()

        def alone() -> None:
            _turn(fast, job, times["alone"], lambda: False)
            _turn(eager.step, eager, times["eager"], lambda: False)

        try:
            compiling.start(process)
            process.begin()
            group = process.group
            assert group is not None
            while not compiling.is_done:
                compile_s += _turn(fast, job, times["beside"], lambda: compiling.is_done)
                turns += 1
                if not compiling.is_done:
                    os.killpg(group, signal.SIGSTOP)
                    alone()
                    os.killpg(group, signal.SIGCONT)
            if not times["alone"]:
                alone()
            compiling.result()
            spent_s = _children_s() - spent_s
            cached_s = in_process(_cached_s, target, folder, timeout_s=TIMEOUT_S)
        finally:
            compiling.close()
    middle, mean = ({name: 1e3 * of(found) for name, found in times.items()} for of in (median, fmean))
    return {
        **{f"{name}_ms": milliseconds for name, milliseconds in middle.items()},
        "over_eager": middle["beside"] / middle["eager"],
        "mean_over_eager": mean["beside"] / mean["eager"],
        "within": mean["beside"] <= BAR * mean["eager"],
        "slowdown": mean["beside"] / mean["alone"],
        "nice": nice,
        "compile_s": compile_s,
        "turns": turns,
        "compile_cores": spent_s / compile_s,
        "cached_s": cached_s,
    }


def _trained(target: str) -> Job:
    job = job_of(target)
    for number in range(3):
        job.step(job.batch(number))
    return job


def _cached_s(target: str, folder: str) -> float:
    """Time of a process that has captured the step until it has the compiled form that is kept."""
    captured = _to_compile(_trained(target))
    start = perf_counter()
    if Compiling(captured, Path(folder), threads=torch.get_num_threads()).found() is None:
        raise HocketError(f"{target}: what was compiled is not kept")
    return perf_counter() - start


def _children_s() -> float:
    """Return the CPU seconds of finished child processes and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _turn(step: Callable[[Any], Any], job: Job, times: list[float], is_over: Callable[[], bool]) -> float:
    """Make and time steps for a while, and return for how long."""
    start = perf_counter()
    number = 0
    while (perf_counter() - start < TURN_S or number < TURN_STEPS) and not is_over():
        begun = perf_counter()
        step(job.batch(number))
        times.append(perf_counter() - begun)
        number += 1
    return perf_counter() - start


def _to_compile(job: Job) -> Captured:
    """The step as it is given to the compiler."""
    batch = job.batch(0)
    places = inventory(job.model, job.optimizer)
    captured = capture_step(job.step, job.model, job.optimizer, batch, split=False)
    failure: CaptureError | None = None
    for form in reversed(compiled_rewrites_of("", captured)):
        for source in compiled_from(form, places):
            try:
                return rewritten(captured, source)
            except CaptureError as error:
                failure = failure or error
    raise HocketError(f"{job.name} has no compiled form: {failure}")


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"target": "{name}", "eager ms": "{eager_ms:.2f}", "alone ms": "{alone_ms:.2f}"},
        **{"beside ms": "{beside_ms:.2f}", "of eager": "{over_eager:.2f}", "of means": "{mean_over_eager:.2f}"},
        **{f"within {BAR}": "{within}", "nice": "{nice}", "compiling s": "{compile_s:.1f}"},
        **{"by cores": "{compile_cores:.2f}", "kept: s": "{cached_s:.2f}"},
    }
    title = "scheduled steps beside the compiler, in turns with such steps alone and eager ones"
    yield table_of(title, columns, result["targets"])
