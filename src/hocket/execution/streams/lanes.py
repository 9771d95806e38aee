"""`StreamLanes`: a plan on streams, launched op by op.

One host thread gives the ops to the streams, level by level (`hocket.ir.launch_order`). An event stands only where an
edge crosses streams and no other event implies it (`hocket.ir.waits`)::

    caller's stream   ... batch |start                               end| loss, parameters ...
    stream 0                    `->[ conv1 ][ conv2 ]...[ dx2 ][ dx1 ]--^
    stream 1                                          |e `->[ dw2 ]----^

*Memory.* The caching allocator gives a freed block to the stream that allocated it, at the host's time, not the
device's. So a value is dropped when the launch has come to an op *of the stream that made it* which runs after all of
its readers: whatever that stream allocates next comes later than every use. Nothing needs `record_stream`, so
`GraphedLanes` can capture it all. Where there is no such op, the value stays until the streams have joined.

*The step's end.* The caller's stream waits for all lanes, so parameters can be used as after an eager step. Letting the
next step begin before the last updates are done would save their tail, and every other reader of a parameter (an
evaluation, a checkpoint, an average of weights) would race with them.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import Executor, below_autograd
from hocket.execution.streams.device import CudaDevice, StreamDevice
from hocket.ir import Graph, Op, Plan, Span, Synchronisation, Timeline, launch_order, synchronisation
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import Program, compile_action


class StreamLanes(Executor):
    """Runs a plan on streams of a device, by default the current CUDA device.

    With `timed` events are recorded around every op, for `timeline`, which costs launch time.
    """

    def __init__(
        self, captured: Captured, plan: Plan, *, device: StreamDevice | None = None, timed: bool = False
    ) -> None:
        super().__init__(captured, plan)
        for lane in plan.lanes:
            if lane.ops and lane.kind != "stream":
                raise ExecutionError(f"lane {lane.name!r} is a lane of {lane.kind}; stream lanes run streams only")
        self.device = device or CudaDevice()
        self.timed = self.keeps_time = timed
        priorities = [lane.priority for lane in plan.lanes]
        self._streams = [
            self.device.stream(priority, priorities[:number].count(priority))
            for number, priority in enumerate(priorities)
        ]
        self._begin = self.device.event()
        self._events: dict[str, Any] = {}
        self._whole = Launch(self, launch_plan_of(captured.program, captured.graph, plan))
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._started: Any = None

    def run(self, frame: Frame) -> None:
        self._start_time()
        self._whole(frame)

    def timeline(self) -> Timeline:
        if not self._marks:
            raise ExecutionError("no step has been timed yet: make the executor with timed=True and run a step")
        spans = []
        for lane in self.plan.lanes:
            for op in lane.ops:
                start, end = self._marks[op]
                start_us = self.device.elapsed_us(self._started, start)
                spans.append(Span(op, lane.name, start_us, start_us + self.device.elapsed_us(start, end)))
        return Timeline(tuple(spans), tuple(lane.name for lane in self.plan.lanes), "measured")

    def close(self) -> None:
        self.device.synchronize()

    def event(self, name: str) -> Any:
        """The event of an op, made when it is first asked for."""
        if name not in self._events:
            self._events[name] = self.device.event()
        return self._events[name]

    def _start_time(self) -> None:
        if self.timed:
            self._started = self.device.event(timed=True)
            self.device.record(self._started, self.device.current())


class Launch:
    """Gives the ops of one part to their streams, between the caller's work before and after."""

    def __init__(self, lanes: StreamLanes, part: LaunchPlan) -> None:
        self.part = part
        self._lanes = lanes
        program = lanes.captured.program
        self._run = {op: compile_action(program.by_name[op], part.dropped.get(op, ())) for op in part.order}
        self._grad_mode = {op: program.by_name[op].grad_mode for op in part.order}
        self._told = {op for others in part.sync.waits.values() for op in others} | set(part.last)

    def __call__(self, frame: Frame) -> None:
        lanes, part, values = self._lanes, self.part, frame.values
        device, streams = lanes.device, lanes._streams
        current = device.current()
        device.record(lanes._begin, current)
        entered: set[int] = set()
        try:
            with below_autograd():
                for name in part.order:
                    number = part.lane_of[name]
                    stream = streams[number]
                    if number not in entered:
                        device.wait(stream, lanes._begin)
                        entered.add(number)
                    for other in part.sync.waits.get(name, ()):
                        device.wait(stream, lanes.event(other))
                    self._one(name, stream, values, frame.numbers)
                    if name in self._told:
                        device.record(lanes.event(name), stream)
        except Exception:
            with suppress(Exception):  # of a device that is gone
                for number in entered:  # what the caller does next comes after what was launched
                    device.record(lanes._begin, streams[number])
                    device.wait(current, lanes._begin)
            raise
        for name in part.last:
            device.wait(current, lanes.event(name))
        for slot in part.late:
            values[slot] = None

    def _one(self, name: str, stream: Any, values: list[Any], numbers: list[Any]) -> None:
        lanes, action, grad_mode = self._lanes, self._run[name], self._grad_mode[name]
        device = lanes.device

        def work() -> None:
            if torch.is_grad_enabled() is not grad_mode:
                torch._C._set_grad_enabled(grad_mode)
            action(values, numbers)

        try:
            if not lanes.timed:
                device.launch(stream, work)
                return
            start, end = lanes._marks.setdefault(name, (device.event(timed=True), device.event(timed=True)))
            device.record(start, stream)
            device.launch(stream, work)
            device.record(end, stream)
        except Exception as error:
            layer = lanes.captured.program.by_name[name].layer
            error.add_note(f"in op {name!r} of layer {layer!r} of the planned step")
            raise


@dataclass(frozen=True)
class LaunchPlan:
    """Order, waits and drops of ops that are launched together.

    A whole step is one launch plan. A CUDA graph and the ops outside of it are two, launched one after the other. Each
    part derives its own waits and drops, since an order that only holds by way of an op of another part does not hold
    inside it.
    """

    order: tuple[str, ...]  # the ops in launch order
    lane_of: dict[str, int]  # op -> number of its lane in the plan
    sync: Synchronisation  # the waits between them
    last: tuple[str, ...]  # the last op of each lane that takes part
    dropped: dict[str, tuple[int, ...]]  # op -> slots to drop once it has been launched
    late: tuple[int, ...]  # slots to drop when the lanes have joined


def launch_plan_of(program: Program, graph: Graph, plan: Plan, ops: Collection[str] | None = None) -> LaunchPlan:
    """Make the launch plan of `ops`, or of all. Other ops that these wait for have been launched before."""
    if ops is not None:
        chosen = set(ops)
        graph = Graph(
            tuple(Op(op.name, op.target, op.role) for op in graph.ops if op.name in chosen),
            tuple(edge for edge in graph.edges if edge.src in chosen and edge.dst in chosen),
        )
        after = {op: tuple(o for o in others if o in chosen) for op, others in plan.after.items() if op in chosen}
        lanes = tuple(replace(lane, ops=tuple(op for op in lane.ops if op in chosen)) for lane in plan.lanes)
        plan = Plan(lanes, {op: others for op, others in after.items() if others}, plan.planner)
    sync = synchronisation(graph, plan)
    dropped, late = drops(program, sync, plan)
    return LaunchPlan(
        launch_order(graph, plan),
        {op: number for number, lane in enumerate(plan.lanes) for op in lane.ops},
        sync,
        tuple(lane.ops[-1] for lane in plan.lanes if lane.ops),
        dropped,
        late,
    )


def drops(program: Program, sync: Synchronisation, plan: Plan) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Find the op after whose launch each value of these ops is dropped, on the lane that made it and after all uses.

    Slots without such an op come second. They are dropped when the lanes have joined.
    """
    readers = program.readers()
    dropped: dict[str, list[int]] = {}
    late: list[int] = []
    for action in program.actions:
        if action.name not in sync.place:
            continue
        number, position = sync.place[action.name]
        lane = plan.lanes[number].ops
        for slot in action.fills:
            if slot in program.kept:
                continue
            users = [action.name, *(reader for reader in readers.get(slot, ()) if reader in sync.place)]
            op = next((op for op in lane[position:] if all(sync.before(user, op) for user in users)), None)
            if op is None:
                late.append(slot)
            else:
                dropped.setdefault(op, []).append(slot)
    return {op: tuple(slots) for op, slots in dropped.items()}, tuple(late)
