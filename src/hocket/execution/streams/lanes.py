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

from typing import Any

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import Executor, below_autograd
from hocket.execution.streams.device import CudaDevice, StreamDevice
from hocket.execution.streams.launch_plan import LaunchPlan, launch_plan_of
from hocket.ir import Plan, Span, Timeline
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import compile_action


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
