"""`GraphedLanes`: a plan on streams, captured once as a CUDA graph and replayed.

A replay launches everything at once at little cost for the host. But a graph repeats the addresses and the numbers that
it was captured with. So

- the batch is copied into the tensors of the capture. Parameters and state have to keep their addresses, and the
  graph is captured again if one was replaced.
- ops whose arguments change between steps (a learning rate, a bias correction) and all that depend on them are launched
  one by one on their streams, after the graph. Usually these are the updates. An optimizer that keeps its numbers on
  the device (``capturable=True``) has none::

      replay | forward, backward | --> launched: updates with this step's learning rate
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hocket.execution.streams.device import StreamDevice
from hocket.execution.streams.lanes import Launch, StreamLanes
from hocket.execution.streams.launch_plan import launch_plan_of
from hocket.ir import Graph, Machine, Plan, Timeline
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import Action
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.state import BatchLeaf

__all__ = ["GraphedLanes", "as_launched", "changing"]

# Steps launched op by op before the capture: libraries choose their kernels and make their workspaces in them.
WARM_UP = 2


class GraphedLanes(StreamLanes):
    """Runs a plan on streams as one CUDA graph. See `StreamLanes` for the arguments."""

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        machine: Machine | None = None,
        graph: Graph | None = None,
        *,
        device: StreamDevice | None = None,
        timed: bool = False,
    ) -> None:
        super().__init__(captured, plan, machine, graph, device=device, timed=timed)
        outside = changing(captured, graph)
        program, order = captured.program, self._whole.part.order
        self._inside = Launch(
            self, launch_plan_of(program, self._graph, plan, [op for op in order if op not in outside])
        )
        self._outside = Launch(self, launch_plan_of(program, self._graph, plan, [op for op in order if op in outside]))
        needed = set(program.kept).union(*(program.by_name[op].reads for op in self._outside.part.order))
        filled = {slot for op in self._inside.part.order for slot in program.by_name[op].fills}
        self._handed_over = tuple(sorted(needed & filled))
        self._results = {
            captured.lowered.slot_of[leaf] for kind, leaf in captured.trace.result.leaves if kind == "tensor"
        }
        self._replay: Callable[[], None] | None = None
        self._seen: dict[int, tuple[int, ...]] = {}
        self._static: list[Any] = []
        self._given: dict[int, Any] = {}
        self._steps = 0

    def run(self, frame: Frame) -> None:
        if self._steps < WARM_UP or not self._inside.part.order:
            super().run(frame)
            self._steps += 1
            return
        self._give(frame)
        if self._replay is None or self._moved(frame):
            self._capture(frame)
        assert self._replay is not None
        self._start_time()
        self._replay()
        for slot in self._handed_over:
            frame.values[slot] = self._given[slot]
        if self._outside.part.order:
            self._outside(frame)
        for slot in self._results.intersection(self._handed_over):
            # The next replay writes over it; what the caller gets is his.
            frame.values[slot] = frame.values[slot].clone()
        self._steps += 1

    def timeline(self) -> Timeline:
        """When each op ran in one further step, made on copies of everything by a graph that records events.

        The graph of the steps themselves records none: each costs about a microsecond. Needs a second step's memory.

        Raises:
            CaptureError: the numbers of the optimizer are others than those that the step was captured with.
        """
        if self.timed:
            return super().timeline()
        timed = GraphedLanes(self.captured, self.plan, graph=self._graph, device=self.device, timed=True)
        index = self.device.index
        with torch.random.fork_rng(devices=[] if index is None else [index]):
            frame = self.captured.rehearse()
            for _ in range(WARM_UP + 1):
                timed.run(frame)
            found = timed.timeline()
        timed.close()
        return found

    def close(self) -> None:
        super().close()
        self._steps = 0
        self._replay, self._static, self._given, self._seen = None, [], {}, {}

    def _give(self, frame: Frame) -> None:
        """Copy the batch to where the graph reads it."""
        for slot, source in self.captured.inputs:
            if type(source) is BatchLeaf and self._static:
                self._static[slot].copy_(frame.values[slot], non_blocking=True)
                frame.values[slot] = self._static[slot]

    def _moved(self, frame: Frame) -> bool:
        """Return True if an input of the graph has another address now."""
        return any(_where(frame.values[slot]) != seen for slot, seen in self._seen.items())

    def _capture(self, frame: Frame) -> None:
        captured = self.captured
        values = list(frame.values)
        for slot, source in captured.inputs:
            if type(source) is BatchLeaf and not self._static:
                values[slot] = frame.values[slot].clone()
        # Views of the batch must be views of the copy.
        captured._started(values, frame.numbers)
        self._seen = {slot: _where(values[slot]) for slot, source in captured.inputs if type(source) is not BatchLeaf}
        self._given = dict.fromkeys(self._handed_over)
        static = Frame(_Keeping(values, self._given), frame.numbers)
        self._replay = self.device.graph(lambda: self._inside(static))
        self._static = static.values


class _Keeping(list[Any]):
    """Slots that remember what was put into some of them, also when a launch has dropped it: others read it later."""

    def __init__(self, values: list[Any], keep: dict[int, Any]) -> None:
        super().__init__(values)
        self._keep = keep

    def __setitem__(self, slot: Any, value: Any) -> None:
        if value is not None and slot in self._keep:
            self._keep[slot] = value
        super().__setitem__(slot, value)


def changing(captured: Captured, graph: Graph | None = None) -> frozenset[str]:
    """Ops that take a number which may be another one in the next step, and all ops after them."""
    graph = graph or captured.graph
    found = {action.name for action in captured.program.actions if _takes_numbers(action)}
    for name in graph.order:
        if found.intersection(graph.predecessors[name]):
            found.add(name)
    return frozenset(found)


def as_launched(captured: Captured, plan: Plan) -> tuple[Plan, frozenset[str]]:
    """`plan` as `GraphedLanes` runs it, for a simulation, and the ops that stay outside of the graph.

    On each lane these come last, and they begin when the graph has ended. Where nothing is left for a graph the plan is
    as it was.
    """
    outside = changing(captured)
    if not outside or len(outside) == len(captured.graph):
        return plan, outside
    inside = [tuple(op for op in lane.ops if op not in outside) for lane in plan.lanes]
    behind = [tuple(op for op in lane.ops if op in outside) for lane in plan.lanes]
    ends = tuple(ops[-1] for ops in inside if ops)
    # An op of the graph waits for none outside: a wait of the plan's own (for memory) is not kept across its end.
    after = {
        op: tuple(other for other in others if op in outside or other not in outside)
        for op, others in plan.after.items()
    }
    after |= {ops[0]: (*after.get(ops[0], ()), *ends) for ops in behind if ops}
    lanes = tuple(
        replace(lane, ops=(*first, *then)) for lane, first, then in zip(plan.lanes, inside, behind, strict=True)
    )
    return replace(plan, lanes=lanes, after={op: others for op, others in after.items() if others}), outside


def _takes_numbers(action: Action) -> bool:
    return any(_has_number((call.args, call.kwargs)) for call in action.calls)


def _has_number(value: Any) -> bool:
    if isinstance(value, TapeRef):
        return True
    if isinstance(value, dict):
        return any(map(_has_number, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_number, value))


def _where(value: Any) -> tuple[int, ...]:
    return (value.data_ptr(), *value.stride()) if isinstance(value, torch.Tensor) else ()
