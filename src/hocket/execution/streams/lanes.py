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

*The step's end.* The caller's stream waits for all lanes, so parameters can be used as after an eager step. With
``overlap=True`` it waits only for those that make what the step returns; then an op of the next step waits for the ops
of this one that it depends on alone (`hocket.ir.carried_waits`), and whoever else wants to look at parameters calls
`join` first.
"""

from __future__ import annotations

from typing import Any

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import Executor, below_autograd
from hocket.execution.streams.device import CudaDevice, StreamDevice
from hocket.execution.streams.launch_plan import LaunchPlan, launch_plan_of
from hocket.ir import Graph, Machine, Plan, Span, Timeline, carried_waits
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import compile_action
from hocket.tracing.state import BatchLeaf

__all__ = ["Launch", "StreamLanes"]


class StreamLanes(Executor):
    """Runs a plan on streams.

    Args:
        captured: the step.
        plan: any plan whose lanes are streams.
        machine: not needed; for the same signature as other executors.
        graph: the orders to keep, when they are not `captured.graph`'s (for tests of broken plans).
        backend: the device; the current CUDA device if not given.
        overlap: let the next step begin before this one's last updates are done.
        timed: record events around every op, for `timeline`; costs launch time.

    Raises:
        PlanError: the plan is not one for this graph.
        ExecutionError: a lane is no stream, or there is no device.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        machine: Machine | None = None,
        graph: Graph | None = None,
        *,
        backend: StreamDevice | None = None,
        overlap: bool = False,
        timed: bool = False,
    ) -> None:
        super().__init__(captured, plan, graph)
        for lane in plan.lanes:
            if lane.ops and lane.kind != "stream":
                raise ExecutionError(f"lane {lane.name!r} is a lane of {lane.kind}; stream lanes run streams only")
        self.backend = backend or CudaDevice()
        self.overlap = overlap
        self.timed = self.keeps_time = timed
        self._graph = graph or captured.graph
        self._streams = [self.backend.stream(lane.priority) for lane in plan.lanes]
        self._begin = self.backend.event()
        self._carried = carried_waits(self._graph, plan, self.sync) if overlap else {}
        self._carriers = {op for others in self._carried.values() for op in others}
        self._events: dict[str, Any] = {}
        program = captured.program
        self._whole = Launch(self, launch_plan_of(program, self._graph, plan))
        makers = {slot: action.name for action in program.actions for slot in action.fills}
        self._returned = self._makers_of_results(makers)
        lane_of = self._whole.part.lane_of
        batch = {slot for slot, source in program.inputs.items() if type(source) is BatchLeaf}
        views = {slot for call in program.prologue.calls if batch & set(call.reads) for slot in call.outs.values()}
        readers = program.readers()
        self._reads_batch = {lane_of[op] for slot in batch | views for op in readers.get(slot, ())}
        # With overlap nobody waits for these: which lanes use their memory when the host forgets it.
        late = (*self._whole.part.late, *batch) if overlap else ()
        self._used_late = {slot: {lane_of[op] for op in readers.get(slot, ())} for slot in late}
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._started: Any = None
        self._steps = 0

    def run(self, frame: Frame) -> None:
        self._whole(frame)
        self._steps += 1

    def join(self) -> None:
        """The caller's stream waits for all that has been launched: then parameters may be read."""
        self._join(self.backend.current())

    def timeline(self) -> Timeline:
        if not self._marks:
            raise ExecutionError("no step has been timed yet: make the executor with timed=True and run a step")
        spans = []
        for lane in self.plan.lanes:
            for op in lane.ops:
                start, end = self._marks[op]
                start_us = self.backend.elapsed_us(self._started, start)
                spans.append(Span(op, lane.name, start_us, start_us + self.backend.elapsed_us(start, end)))
        return Timeline(tuple(spans), tuple(lane.name for lane in self.plan.lanes), "measured")

    def close(self) -> None:
        self.backend.synchronize()
        self._steps = 0

    def event(self, name: str) -> Any:
        """The event of an op, made when it is first asked for."""
        if name not in self._events:
            self._events[name] = self.backend.event()
        return self._events[name]

    def _join(self, stream: Any) -> None:
        for name in self._whole.part.last:
            self.backend.wait(stream, self.event(name))

    def _makers_of_results(self, makers: dict[int, str]) -> tuple[str, ...]:
        captured = self.captured
        slots = [captured.lowered.slot_of[leaf] for kind, leaf in captured.trace.result.leaves if kind in _TENSORS]
        return tuple(dict.fromkeys(makers[slot] for slot in slots if slot in makers))


_TENSORS = ("tensor", "item")


class Launch:
    """Gives the ops of one part to their streams, between the caller's work before and after."""

    def __init__(self, lanes: StreamLanes, part: LaunchPlan) -> None:
        self.part = part
        self._lanes = lanes
        program = lanes.captured.program
        self._run = {op: compile_action(program.by_name[op], part.dropped.get(op, ())) for op in part.order}
        self._grad_mode = {op: program.by_name[op].grad_mode for op in part.order}
        awaited = {op for others in part.sync.waits.values() for op in others}
        self._told = awaited | set(part.last) | lanes._carriers
        if lanes.overlap:
            self._told |= set(lanes._makers_of_results({s: a.name for a in program.actions for s in a.fills}))

    def __call__(self, frame: Frame) -> None:
        lanes, part, values = self._lanes, self.part, frame.values
        backend, streams = lanes.backend, lanes._streams
        current = backend.current()
        if lanes.timed:
            lanes._started = backend.event(timed=True)
            backend.record(lanes._started, current)
        backend.record(lanes._begin, current)
        overlapping = lanes.overlap and lanes._steps > 0
        entered: set[int] = set()
        with below_autograd():
            for name in part.order:
                number = part.lane_of[name]
                stream = streams[number]
                if number not in entered and (not overlapping or number in lanes._reads_batch):
                    backend.wait(stream, lanes._begin)
                    entered.add(number)
                if overlapping:
                    for other in lanes._carried.get(name, ()):
                        backend.wait(stream, lanes.event(other))
                for other in part.sync.waits.get(name, ()):
                    backend.wait(stream, lanes.event(other))
                self._one(name, stream, values, frame.numbers)
                if name in self._told:
                    backend.record(lanes.event(name), stream)
        if lanes.overlap:
            for name in lanes._returned:
                backend.wait(current, lanes.event(name))
            for slot, users in lanes._used_late.items():
                for number in users:
                    if isinstance(values[slot], torch.Tensor):
                        backend.keep(values[slot], streams[number])
            return
        for name in part.last:
            backend.wait(current, lanes.event(name))
        for slot in part.late:
            values[slot] = None

    def _one(self, name: str, stream: Any, values: list[Any], numbers: list[Any]) -> None:
        lanes, action, grad_mode = self._lanes, self._run[name], self._grad_mode[name]
        backend = lanes.backend

        def work() -> None:
            if torch.is_grad_enabled() is not grad_mode:
                torch._C._set_grad_enabled(grad_mode)
            action(values, numbers)

        try:
            if not lanes.timed:
                backend.launch(stream, work)
                return
            start, end = lanes._marks.setdefault(name, (backend.event(timed=True), backend.event(timed=True)))
            backend.record(start, stream)
            backend.launch(stream, work)
            backend.record(end, stream)
        except Exception as error:
            layer = lanes.captured.program.by_name[name].layer
            error.add_note(f"in op {name!r} of layer {layer!r} of the planned step")
            raise
