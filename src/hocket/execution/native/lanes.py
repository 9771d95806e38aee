"""`NativeLanes`: a plan on lanes that never wait for the interpreter."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import Executor, releases
from hocket.execution.channels import Channel
from hocket.execution.native.binding import Binding
from hocket.execution.native.channels import NativeChannels
from hocket.execution.native.thread_assignment import Workers, workers_of
from hocket.execution.process import cpus_of, forked
from hocket.execution.streams.graph_parts import input_tensors
from hocket.heap import trim_heap
from hocket.ir import Machine, Plan, Span, Timeline
from hocket.native import available, load
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import Action, Call, Program, Slot
from hocket.tracing.scalars.tape import TapeRef

log = logging.getLogger(__name__)

# A step whose batches or places go on changing is not bound again and again.
MAX_BINDINGS = 4


class NativeLanes(Executor):
    """Runs a plan on native lanes: the same rules and errors as `ThreadLanes`, without Python between ops."""

    starts_with_prologue = True

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        machine: Machine | None = None,
        channels: Mapping[str, Channel] | None = None,
    ) -> None:
        super().__init__(captured, plan)
        ready = available()
        if not ready:
            raise ExecutionError(ready.why)
        for lane in plan.lanes:
            if lane.ops and lane.kind == "stream":
                raise ExecutionError(f"lane {lane.name!r} is a {lane.kind}; native lanes are lanes of cores only")
        if any(value.is_cuda for value in input_tensors(captured).values()):
            raise ExecutionError("the step is on a GPU, and native lanes run ops of the CPU")
        lanes = [lane for lane in plan.lanes if lane.ops and lane.kind == "cores"]
        self._channels = NativeChannels(captured, plan, channels or {})
        self._cpus = {lane.name: sorted(cpus_of(lane, machine)) for lane in lanes}
        self._shared = self._divided()
        self._inputs = [slot for slot, _ in captured.inputs]
        self._kept = sorted(slot for slot in captured.program.kept if slot not in captured.program.inputs)
        self._busy = threading.Lock()
        self._script: _Script | None = None
        self._core: Any = None
        self._pid = 0
        self._runs = 0
        self._binding: Binding | None = None
        self._num_bindings = 0
        self._times: list[Any] = []  # of the last step, once the lanes are closed

    def __call__(self, batch: Any) -> Any:
        with self.undoing():
            return self._called(batch)

    def _called(self, batch: Any) -> Any:
        if (binding := self.binding) is not None and self._claimed():
            try:
                if binding.begin(batch):
                    self._runs += 1
                    self._step(self._core.run_begun)
                    return binding.finish()
            finally:
                self._busy.release()
        frame = self.begin(batch)
        if self._runs and self._pid == os.getpid() and not self._channels.ops.lanes:
            self._bind(batch)  # while all inputs are as the step was captured with: it may leave others behind
        self.run(frame)
        return self.captured.finish(frame)

    @property
    def binding(self) -> Binding | None:
        return self._binding if self._pid == os.getpid() else None

    def run(self, frame: Frame) -> None:
        self._claimed()
        try:
            if self._pid != os.getpid():
                self._start()
            if self._runs == 1:
                # The last eager step's gradients have been replaced: lanes have memory of their own.
                trim_heap()
            self._runs += 1
            kept = self._run_core(frame)
            for slot, value in zip(self._kept, kept, strict=True):
                frame.values[slot] = value
        finally:
            self._busy.release()

    def begun(self) -> Collection[str] | None:
        if self._core is None or self._channels.ops.lanes:
            return None
        found: list[str] = []
        for number, (worker, times) in enumerate(zip(self._shared.workers, self._core.times(), strict=True)):
            first = 1 if number == 0 else 0  # the prologue makes views
            found += [op for at, op in enumerate(worker.ops, first) if times[2 * at] >= 0]  # since the step began
        return found

    def timeline(self) -> Timeline:
        if not self._runs or (self._core is None and not self._times):
            raise ExecutionError("no step has run yet")
        spans = []
        measured = self._times if self._core is None else self._core.times()
        for number, (worker, times) in enumerate(zip(self._shared.workers, measured, strict=True)):
            first = 1 if number == 0 else 0  # the prologue is not an op of the plan
            for at, (op, lane) in enumerate(zip(worker.ops, worker.lanes, strict=True), first):
                spans.append(Span(op, lane.name, times[2 * at] / 1000, times[2 * at + 1] / 1000))
        spans += self._channels.ops.spans(self._channels.epoch, self._channels.began_ns)
        return Timeline(tuple(spans), tuple(lane.name for lane in self.plan.lanes), "measured")

    def close(self) -> None:
        if self._core is not None and self._pid == os.getpid():
            self._times = self._core.times() if self._runs else []
            self._core.close()
            self._channels.close()
        self._core, self._pid, self._binding = None, 0, None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the modules that `close` uses may be empty, and threads end with the process.
        if getattr(self, "_core", None) is not None and not is_finalizing():
            self.close()

    def _claimed(self) -> bool:
        """Claim the step for this thread, and return True. Another thread that runs it is an `ExecutionError`."""
        if self._busy.acquire(blocking=False):
            if self._core is None or self._pid != os.getpid() or self._core.is_free():
                return True
            self._busy.release()
        raise ExecutionError("this step is already running in another thread; give each thread a schedule of its own")

    def _step(self, run: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return run(*arguments)
        except BaseException as error:
            self.annotate(error)
            raise

    def _run_core(self, frame: Frame) -> Any:
        """The values of the kept slots."""
        if not self._channels.ops.lanes:
            return self._step(self._core.run, frame.values, frame.numbers, self._inputs, self._kept)
        self._core.fill(frame.values, frame.numbers, self._inputs)
        try:
            with self._channels.step():
                self._step(self._core.step)
            return self._core.take(self._kept)
        except BaseException:
            self._core.clear()  # not before the channels know that the step was left
            raise

    def _bind(self, batch: Any) -> None:
        """From the next step on, read and put back natively, where the native core can."""
        if self._num_bindings >= MAX_BINDINGS:
            return
        self._num_bindings += 1
        try:
            self._binding = Binding(self.captured, self._core, batch)
        except (TypeError, ValueError, LookupError) as error:
            self._binding = None
            log.debug("hocket: the step is read and put back in Python: %s", error)

    def annotate(self, error: BaseException) -> None:
        worker, at = self._core.failed() if self._core is not None else (-1, -1)
        self.failed_op = ""
        if worker < 0 or at < 0:
            return
        names = (["the prologue"] if worker == 0 else []) + list(self._shared.workers[worker].ops)
        self.failed_op = names[at]
        self.left = dict(zip(self.captured.program.effect_slots, self._core.left(), strict=True))
        action = self.captured.program.by_name.get(self.failed_op)
        layer = action.layer if action is not None else ""
        error.add_note(f"in op {self.failed_op!r} of layer {layer!r} of the planned step")

    def _usual_width(self) -> int:
        # In a forked child the caller's team of threads stayed behind: there it runs ops of one thread only.
        return 1 if forked() else torch.get_num_threads()

    def _divided(self) -> Workers:
        self._usual = self._usual_width()
        return workers_of(self.captured.graph, self.plan, self.sync, self._usual)

    def _start(self) -> None:
        self._binding, self._num_bindings = None, 0
        if self._usual_width() != self._usual:
            self._shared, self._script = self._divided(), None
        script = self._script = self._script or self._written()
        core = load().Core(self.captured.program.num_slots, len(script.words) + 1, script.num_users)
        for name, arguments in script.commands:
            getattr(core, name)(*arguments)
        core.set_effects(self.captured.program.effect_slots)
        core.start()
        self._channels.start(core, script.words, self._shared.sync, script.freed)
        self._core, self._pid = core, os.getpid()

    def _written(self) -> _Script:
        """The commands that build a core, which are the same each time the lanes are opened."""
        program, sync, asleep = self.captured.program, self._shared.sync, self._shared.asleep
        release = releases(program, sync)
        counter = {slot: number for number, slot in enumerate(release.shared)}
        counted: dict[str, list[tuple[int, int]]] = {}
        for slot, users in release.shared.items():
            for user in users:
                counted.setdefault(user, []).append((counter[slot], slot))
        awaited = {before for waited in (*sync.waits.values(), *asleep.values()) for before in waited}
        awaited |= self._channels.awaited(sync)
        # An action that reads a view of an input waits for the prologue, on any worker.
        words = {name: number + 1 for number, name in enumerate(sorted(awaited))}
        commands: list[tuple[str, tuple[Any, ...]]] = []
        early = set(program.prologue.fills)
        moved = {op for lane in self._channels.ops.lanes for op in lane.ops}  # what arrives is slept for
        for number, worker in enumerate(self._shared.workers):
            commands.append(("add_worker", ()))
            if number == 0:
                width, cpus = torch.get_num_threads(), []
                if worker.lanes:
                    width, cpus = worker.lanes[0].width, self._cpus[worker.lanes[0].name]
                label = "hocket: views of inputs"
                commands.append(("add_action", (label, width, cpus, False, [], [], 0, [], [])))
                commands += _views_of(program)
            knows_views = number == 0
            for name, lane in zip(worker.ops, worker.lanes, strict=True):
                action = program.by_name[name]
                waited = sync.waits.get(name, ())
                arrivals = [before for before in waited if before in moved]
                sleeps = [words[before] for before in dict.fromkeys((*asleep.get(name, ()), *arrivals))]
                waits = [words[before] for before in waited if before not in moved]
                if not knows_views and early.intersection(action.reads):
                    waits.append(0)
                    knows_views = True
                own, frees = words.get(name, -1), list(release.frees.get(name, ()))
                label = f"hocket: {name}" + (f" ({action.layer})" if action.layer else "")
                after, cpus = counted.get(name, []), self._cpus[lane.name]
                how = (label, lane.width, cpus, action.grad_mode, sleeps, waits, own, frees, after)
                commands.append(("add_action", how))
                commands += _calls_of(action)
        freed = {op: (list(release.frees.get(op, ())), counted.get(op, [])) for op in moved}
        return _Script(words, [len(users) for users in release.shared.values()], commands, freed)


@dataclass(frozen=True)
class _Script:
    """The commands that build a core, and what is known of them."""

    words: dict[str, int]  # the op whose end a word says
    num_users: list[int]  # of each slot that several workers read
    commands: list[tuple[str, tuple[Any, ...]]]  # methods of the core with their arguments
    freed: dict[str, tuple[list[int], list[tuple[int, int]]]]  # what is freed after each channel op


def _views_of(program: Program) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the commands for the prologue. A view with the same shape in each step is made in the first one only."""
    calls = [call for action in (program.prologue, *program.actions) for call in action.calls]
    reshaped = {
        slot for call in calls if torch.Tag.inplace_view in getattr(call.func, "tags", ()) for slot in call.reads
    }
    standing = set(program.inputs)
    for call, command in zip(program.prologue.calls, _calls_of(program.prologue), strict=True):
        yield command
        own = set(call.outs.values())
        if _stands(call) and standing.issuperset(call.reads) and own.isdisjoint(program.kept | reshaped):
            standing |= own
            yield "stands", call.reads


def _stands(call: Call) -> bool:
    """True if a call is one view, of one tensor, that lies in it where all its like do."""
    is_absolute = call.func is torch.ops.aten.as_strided.default  # its offset is that in the memory
    is_alike = getattr(call.func, "is_view", False) and not is_absolute and list(call.outs) == [None]
    return is_alike and len(call.reads) == 1 and not call.numbers


def _calls_of(action: Action) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for call in action.calls:
        schema = getattr(call.func, "_schema", None)
        if schema is None:
            raise ExecutionError(f"op {action.name!r}: {call.func} is not an op of torch's dispatcher")
        outs = [(-1 if position is None else position, slot) for position, slot in call.outs.items()]
        yield "add_call", (schema.name, schema.overload_name, _arguments(call, schema), outs)


def _arguments(call: Call, schema: Any) -> list[Any]:
    """Return the call's arguments in the schema's order, as the core expects them, with None for defaults."""
    given: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        if position < len(call.args) and not argument.kwarg_only:
            given.append(_argument(call.args[position]))
        elif argument.name in call.kwargs:
            given.append(_argument(call.kwargs[argument.name]))
        else:
            given.append(None)
    return given


def _argument(value: Any) -> tuple[str, Any]:
    if isinstance(value, Slot):
        return ("s", value.index)
    if isinstance(value, TapeRef):
        return ("n", value.index)
    if isinstance(value, (list, tuple)):
        elements = [_argument(element) for element in value]
        if any(kind != "c" for kind, _ in elements):
            return ("l", elements)
        return ("c", list(value))
    return ("c", value)
