"""The timeline of an eager step: its ops, and between them autograd, the dispatcher and Python.

torch's profiler records when each op began and ended on the thread that runs the step. All of that thread's time
belongs to one of three rows::

    ops        [ addmm ]   [ relu ]        [ mm ]        what the captured graph holds
    dispatch            [ ]        [  ]          [  ]    other time inside torch: autograd, views, allocation
    Python                             [  ]              time outside of torch

An op's own way to its kernel counts as the op. The profiler itself takes time at each event, so the record is scaled to
the time that a step takes without it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket.ir import Graph, Op, Span, Timeline

OPS, DISPATCH, PYTHON = "ops", "dispatch", "Python"

# The first step under the profiler also starts it. Of the others the fastest is kept.
RECORDED_STEPS = 4

_STEP = "hocket: one step"
# An optimizer's `step` and `zero_grad` are recorded, too, and are Python themselves.
_PYTHON_SCOPES = ("Optimizer.", _STEP)
_BACKWARD, _UPDATE = "autograd::engine::", "Optimizer.step"
_NO_KERNELS = ("empty", "detach", "resolve_", "_reshape_alias", "item", "_local_scalar_dense")


@dataclass(frozen=True)
class EagerRecord:
    """One eager step."""

    timeline: Timeline  # rows ``ops``, ``dispatch`` and ``Python``. An op of the graph has the name that it has there.
    ops: tuple[Op, ...]  # the ops and pieces of the timeline that are not in the graph
    recorded_us: float  # duration under the profiler, before scaling
    # an upper bound on the share of the other cores' time in which threads of this process ran. None on one core.
    others_busy: float | None

    def share(self, row: str) -> float:
        """Return the share of the step that a row takes."""
        return self.timeline.busy_us[row] / (self.timeline.makespan_us or 1.0)


def record_eager(
    step: Callable[[Any], object], batches: Iterator[Any], graph: Graph, *, cores: int, step_us: float | None = None
) -> EagerRecord:
    """Record eager steps, and return the fastest.

    Ops are matched by target with those of `graph`, in order, where eager has as many of a target. `batches` are
    made before each step, and `step_us`, the duration of a step without the profiler, is what the record is scaled
    to.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch would write two lines to stderr
    made = [next(batches) for _ in range(RECORDED_STEPS)]
    # Torch 2.11 warns of what is lost between cycles otherwise, and there is only one.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for number, batch in enumerate(made):
            if number == 1:
                start, own, all_threads = perf_counter(), thread_time(), process_time()
            with record_function(_STEP):
                step(batch)
        wall = perf_counter() - start
        others = (process_time() - all_threads) - (thread_time() - own)
    recorded = [event for event in _events(profiler) if event.name == _STEP][1:]
    fastest = min(recorded, key=lambda event: event.end_us - event.start_us)
    recorded_us = fastest.end_us - fastest.start_us
    timeline, ops = _timeline(fastest, graph, (step_us or recorded_us) / recorded_us)
    busy = min(1.0, max(0.0, others / (wall * (cores - 1)))) if cores > 1 else None
    return EagerRecord(timeline, ops, recorded_us, busy)


@dataclass(eq=False)
class _Event:
    """An event of the profiler, with the events inside it."""

    name: str
    start_us: float
    end_us: float
    inside: list[_Event] = field(default_factory=list)

    def walk(self) -> Iterator[_Event]:
        yield self
        for event in self.inside:
            yield from event.walk()


def _events(profiler: profile) -> list[_Event]:
    """Return the outermost events of this thread."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    recorded = profiler.profiler.kineto_results.events()
    thread = next(event.start_thread_id() for event in recorded if event.name() == _STEP)
    found = [
        _Event(event.name(), event.start_ns() / 1e3, event.end_ns() / 1e3)
        for event in recorded
        if event.start_thread_id() == thread
    ]
    found.sort(key=lambda event: (event.start_us, -event.end_us))
    outer: list[_Event] = []
    open_events: list[_Event] = []
    for event in found:
        while open_events and event.start_us >= open_events[-1].end_us:
            open_events.pop()
        (open_events[-1].inside if open_events else outer).append(event)
        open_events.append(event)
    return outer


def _timeline(step: _Event, graph: Graph, scale: float) -> tuple[Timeline, tuple[Op, ...]]:
    names = _matched(step, graph)
    spans: list[Span] = []
    ops: list[Op] = []

    def add(row: str, begin_us: float, end_us: float, name: str = "", role: str = "other") -> None:
        if end_us <= begin_us:
            return
        if not name:
            name = f"{row}#{len(ops)}"
            ops.append(Op(name, role=role))
        start, end = (begin_us - step.start_us) * scale, (end_us - step.start_us) * scale
        spans.append(Span(name, row, start, end))

    def visit(event: _Event, row: str, role: str) -> None:
        """Add an event whose own time belongs to `row`."""
        if event in names:
            add(OPS, event.start_us, event.end_us, names[event])
            return
        at_us = event.start_us
        if event.name.startswith(_PYTHON_SCOPES):
            row = PYTHON
            role = "update" if event.name.startswith(_UPDATE) else role
        else:
            role = "activation_grad" if event.name.startswith(_BACKWARD) else role
            row = DISPATCH
        if _computes(event, names):
            if event.end_us > event.start_us:  # a clock may see none of a short op
                ops.append(Op(f"{event.name.removeprefix('aten::')}#{len(ops)}", event.name.replace("::", "."), role))
                add(OPS, event.start_us, event.end_us, ops[-1].name)
            return
        for inner in event.inside:
            add(row, at_us, inner.start_us)
            visit(inner, row, role)
            at_us = max(at_us, inner.end_us)
        add(row, at_us, event.end_us)

    visit(step, PYTHON, "forward")
    return Timeline(tuple(spans), (OPS, DISPATCH, PYTHON), "measured"), tuple(ops)


def _matched(step: _Event, graph: Graph) -> dict[_Event, str]:
    by_target: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops:
        by_target[op.target.removeprefix("aten.").split(".")[0]].append(op.name)
    events: dict[str, list[_Event]] = defaultdict(list)

    def visit(event: _Event) -> None:
        target = event.name.removeprefix("aten::")
        if target != event.name and target in by_target:
            events[target].append(event)
            return
        for inner in event.inside:
            visit(inner)

    visit(step)
    return {
        event: op
        for target, found in events.items()
        if len(found) == len(by_target[target])
        for event, op in zip(found, by_target[target], strict=True)
    }


def _computes(event: _Event, names: dict[_Event, str]) -> bool:
    """Return True if an unmatched event is an op that computes, and no matched one lies inside it."""
    if not event.name.startswith("aten::") or any(inner in names for inner in event.walk()):
        return False
    return not all(_is_view(inner.name) for inner in event.walk())


@cache
def _is_view(name: str) -> bool:
    """Return True if an op only describes, allocates or reads memory."""
    target = name.removeprefix("aten::")
    if target.startswith(_NO_KERNELS) or not name.startswith("aten::"):
        return True
    packet = getattr(torch.ops.aten, target, None)
    if packet is None:
        return False
    schema = getattr(packet, packet.overloads()[0])._schema
    returned = schema.returns[0].alias_info if schema.returns else None
    return returned is not None and not returned.is_write
