"""The tracer: durations of ops, taken inside whole steps.

An op is timed where it stands, after its predecessors and with the caches they leave, not alone in a loop. The minimum
over the runs is the oracle's value (noise on a shared machine only ever adds), and the spread is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from statistics import median

import torch

from hocket.errors import ExecutionError, InputError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.streams import GraphedLanes, StreamDevice, StreamLanes
from hocket.execution.streams.graph_parts import input_tensors
from hocket.ir import Costs, Device, Lane, Machine, Plan, Timeline, one_by_one
from hocket.ir.placement import scattered
from hocket.profiling.hill_climb import COMPACT, FEW_CORES, SCATTER, Setting, climbing
from hocket.tracing.captured import Captured
from hocket.tracing.program import compile_action

# Counted steps that take this long together are enough: what disturbs a step is averaged within a long one.
ENOUGH_MS = 500.0


def default_widths(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    return tuple(sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power < cores), cores}))


def serial_plan(
    captured: Captured, width: int, machine: Machine, exact: Mapping[str, Collection[int]] | None = None
) -> Plan:
    """The ops in eager's order, one after another, with `width` threads on the first cores.

    An op that may not have this width, by `exact`, takes the nearest that it may have.
    """
    device = _cpu(machine)
    widths = dict.fromkeys(captured.graph.order, width)
    for op, possible in (exact or {}).items():
        widths[op] = min(possible, key=lambda other: (abs(other - width), -other))
    return one_by_one(captured.graph, captured.graph.order, widths, device)


def trace_costs(
    captured: Captured, *, widths: Sequence[int] | None, runs: int, machine: Machine, kind: str = "auto"
) -> Costs:
    """See `hocket.profile`."""
    cores = machine.cores
    chosen = tuple(widths) if widths is not None else default_widths(cores)
    if not chosen or min(chosen) < 1 or max(chosen) > cores:
        raise InputError(f"profile: expected widths between 1 and the machine's {cores} cores, got {list(chosen)}")
    if runs < 1:
        raise InputError(f"profile: expected at least one run, got {runs}")

    def timed(width: int, affinity: str = COMPACT) -> list[Timeline]:
        plan = serial_plan(captured, width, machine)
        lanes = executor(captured, scattered(plan, machine) if affinity == SCATTER else plan, machine, kind=kind)
        return _timed(captured, lanes, runs)

    with torch.random.fork_rng(devices=()):
        if widths is None and cores > FEW_CORES:
            return _climbed(climbing(captured.graph.ops, _cpu(machine)), timed)
        return costs_of({width: timed(width) for width in chosen})


def _cpu(machine: Machine) -> Device:
    return next(device for device in machine.devices if device.kind == "cpu")


def _climbed(
    climb: Generator[Setting, Sequence[Timeline], Costs], timed: Callable[[int, str], list[Timeline]]
) -> Costs:
    setting = next(climb)
    while True:
        try:
            setting = climb.send(timed(*setting))
        except StopIteration as end:
            return end.value


def _timed(captured: Captured, lanes: Executor, runs: int) -> list[Timeline]:
    """When the ops of some steps ran, after one that is not counted. Closes the lanes."""
    views_of_inputs = compile_action(captured.program.prologue)
    frame = captured.rehearse()
    found = []
    for run in range(1 + runs):
        if run and not lanes.starts_with_prologue:  # the step before has freed them
            with torch.no_grad():
                views_of_inputs(frame.values, frame.numbers)
        lanes.run(frame)
        found.append(lanes.timeline())
    del frame  # on closing, native lanes free the memory that has no other owner
    lanes.close()
    return found[1:]


def steps_of(lanes: Executor, runs: int, warm_up: int = 0) -> Generator[Executor, None, list[Timeline]]:
    """Ask for steps by an executor, and return when the ops of all but the first few ran. Closes the executor.

    Steps that take `ENOUGH_MS` in all are enough, however many they are.
    """
    found: list[Timeline] = []
    try:
        while len(found) < warm_up + runs and sum(each.makespan_us for each in found[warm_up:]) < ENOUGH_MS * 1e3:
            yield lanes
            found.append(lanes.timeline())
    finally:
        lanes.close()
    return found[warm_up:]


def cuda_index(captured: Captured) -> int | None:
    """Return the CUDA device of a step, or None if it has none."""
    return next((value.device.index for value in input_tensors(captured).values() if value.is_cuda), None)


def trace_streams(
    captured: Captured, device: StreamDevice, runs: int, *, lanes: type[StreamLanes] = GraphedLanes
) -> Costs:
    """Time the ops of a step on one stream by events, in a CUDA graph by default, in steps on copies of all state.

    What the host sees of a launch says nothing about its kernel.

    `runs` steps are counted, after one that is not.
    """
    if runs < 1:
        raise InputError(f"profile: expected at least one run, got {runs}")
    plan = Plan((Lane("gpu0.0", captured.graph.order, "stream", "gpu0"),), planner="serial")
    timing = lanes(captured, plan, device=device, timed=True)
    found = []
    with torch.random.fork_rng(devices=[] if device.index is None else [device.index]):
        for _ in range(1 + runs):
            timing.run(captured.rehearse())
            found.append(timing.timeline())
    failure = timing.failure
    timing.close()
    if failure:
        raise ExecutionError(f"profile: the step cannot be captured as a CUDA graph: {failure}")
    return costs_of({"gpu0": found[1:]})


def costs_of(measured: Mapping[int, Iterable[Timeline]] | Mapping[str, Iterable[Timeline]]) -> Costs:
    """Costs from the timelines of whole steps, by width (or by device)."""
    durations: dict[str, dict[str, float]] = {}
    spreads: dict[str, dict[str, float]] = {}
    for width, timelines in measured.items():
        samples: dict[str, list[float]] = {}
        for timeline in timelines:
            for span in timeline.spans:
                samples.setdefault(span.op, []).append(span.end_us - span.start_us)
        for op, values in samples.items():
            durations.setdefault(op, {})[str(width)] = min(values)
            spreads.setdefault(op, {})[str(width)] = median(values) - min(values)
    return Costs(durations, spreads)
