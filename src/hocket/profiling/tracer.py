"""The tracer: durations of ops, taken inside whole steps.

An op is timed where it stands, after its predecessors and with the caches they leave, not alone in a loop. The minimum
over the runs is the oracle's value (noise on a shared machine only ever adds), and the spread is kept beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

import torch

from hocket.errors import InputError
from hocket.execution import executor
from hocket.ir import Costs, Machine, Plan, Timeline, one_by_one
from hocket.tracing.captured import Captured
from hocket.tracing.program import compile_action


def default_widths(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    return tuple(sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power < cores), cores}))


def serial_plan(
    captured: Captured, width: int, machine: Machine, exact: Mapping[str, Collection[int]] | None = None
) -> Plan:
    """The ops in eager's order, one after another, with `width` threads on the first cores.

    Args:
        captured: the step.
        width: threads.
        machine: the cores.
        exact: for each op the widths that it may have. One that may not have this width takes the nearest.
    """
    device = next(device for device in machine.devices if device.kind == "cpu")
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
    with torch.random.fork_rng(devices=()):
        return costs_of({width: _timed(captured, width, runs, machine, kind) for width in chosen})


def _timed(captured: Captured, width: int, runs: int, machine: Machine, kind: str) -> list[Timeline]:
    """When the ops of some steps ran, after one that is not counted."""
    lanes = executor(captured, serial_plan(captured, width, machine), machine, kind=kind)
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
