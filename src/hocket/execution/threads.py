"""Lanes as Python threads: the reference executor.

Each lane is a thread of fixed width, pinned to its cores, with a queue of one step at a time. A plan with one lane
that is as wide as the caller runs on the caller's own thread. Torch gives the interpreter lock back inside an op, so
lanes overlap wherever ops last longer than the few microseconds that Python takes between them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, TypeAlias

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import Executor, arrivals_apart, below_autograd, releases
from hocket.execution.channels import Channel, ChannelOps
from hocket.execution.process import cpus_of, forked
from hocket.ir import Machine, Plan, Span, Timeline, synchronisation
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import compile_action


@dataclass
class _Action:
    """One op on its lane, with its waits, its function, the ops that it wakes, and the values that it frees.

    A channel op waits for its `gates` before it begins for the next step, and `frees` values when it is over. An op of
    a lane of cores frees its values in `run`.
    """

    name: str
    run: Callable[[list[Any], list[Any]], None]
    grad_mode: bool
    waits: list[Any] = field(default_factory=list)
    wakes: list[Any] = field(default_factory=list)
    gates: list[Any] = field(default_factory=list)
    frees: tuple[int, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


_Inbox: TypeAlias = "SimpleQueue[tuple[ThreadLanes, Frame, list[int]] | None]"


class ThreadLanes(Executor):
    """Runs a plan on Python threads. The arguments are those of `hocket.execution.executor`.

    Raises:
        PlanError: the plan is not one for this graph.
        ExecutionError: a lane is pinned to cores that this process may not use, or there is no channel for it.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        machine: Machine | None = None,
        channels: Mapping[str, Channel] | None = None,
    ) -> None:
        super().__init__(captured, plan)
        self._lanes = [lane for lane in plan.lanes if lane.ops]
        for lane in self._lanes:
            if lane.kind == "stream":
                raise ExecutionError(f"lane {lane.name!r} is a {lane.kind}; Python threads run lanes of cores only")
        self._channel_ops = ChannelOps(captured, plan, channels or {})
        self._epoch = 0
        self._values: list[Any] = []
        self._cpus = [cpus_of(lane, machine) if lane.kind == "cores" else set() for lane in self._lanes]
        self._actions = self._compile()
        self._times: list[list[tuple[int, int]]] = [[] for _ in self._lanes]
        self._began_ns = 0
        self._counters: dict[int, Any] = {}
        self._failure: tuple[str, BaseException] | None = None
        self._stop = False
        self._busy = threading.Lock()
        self._queues: list[_Inbox] = []
        self._done: SimpleQueue[int] = SimpleQueue()
        self._pid = 0

    def run(self, frame: Frame) -> None:
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "this step is already running in another thread; give each thread a schedule of its own"
            )
        try:
            if self._channel_ops.failure is not None:
                raise self._channel_ops.failure
            self._epoch, self._values = self._epoch + 1, frame.values
            self._counters = {slot: itertools.count(1) for slot, _ in self._shared_slots}
            self._began_ns = perf_counter_ns()
            alone = len(self._lanes) == 1 and self._lanes[0].kind == "cores"
            if alone and self._lanes[0].width == torch.get_num_threads() and not forked():
                self._run_lane(0, frame)
            else:
                self._run_threads(frame)
            if self._failure is None:
                self._channel_ops.wait(self._epoch)
            if self._failure is not None:
                raise self._failed()
        except BaseException as error:
            self._channel_ops.stop(error)
            self.left = {slot: frame.values[slot] for slot in self.captured.program.effect_slots}
            raise
        finally:
            self._values = []
            self._busy.release()

    def begun(self) -> Collection[str] | None:
        if self._channel_ops.lanes:
            return None
        return [
            action.name
            for actions, times in zip(self._actions, self._times, strict=True)
            for action in actions[: len(times) + 1]
        ]

    def timeline(self) -> Timeline:
        if not any(self._times):
            raise ExecutionError("no step has run yet")
        spans = []
        for lane, actions, times in zip(self._lanes, self._actions, self._times, strict=True):
            for action, (start, end) in zip(actions, times, strict=False):
                began = self._began_ns
                spans.append(Span(action.name, lane.name, (start - began) / 1000, (end - began) / 1000))
        spans += self._channel_ops.spans(self._epoch, self._began_ns)
        return Timeline(tuple(spans), tuple(lane.name for lane in self.plan.lanes), "measured")

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._queues = []
        self._pid = 0

    def __del__(self) -> None:
        if getattr(self, "_queues", ()):
            self.close()

    def _compile(self) -> list[list[_Action]]:
        program = self.captured.program
        sync = synchronisation(self.captured.graph, arrivals_apart(self.plan))
        release = releases(program, sync)
        self._shared_slots = tuple((slot, len(users)) for slot, users in release.shared.items())
        shared: dict[str, list[tuple[int, int]]] = {}
        for slot, users in release.shared.items():
            for user in users:
                shared.setdefault(user, []).append((slot, len(users)))
        actions = {
            name: _Action(
                name,
                compile_action(program.by_name[name], release.frees.get(name, ())),
                program.by_name[name].grad_mode,
                frees=release.frees.get(name, ()),
                shared=tuple(shared.get(name, ())),
            )
            for lane in self._lanes
            for name in lane.ops
        }
        self._locks: list[tuple[_Action, _Action]] = []
        for name, waited in sync.waits.items():
            self._locks += [(actions[before], actions[name]) for before in waited]
        self._gates = [
            (actions[before], actions[op])
            for lane in self._channel_ops.lanes
            for op in lane.ops
            for before in self._channel_ops.gates(op) or ()
        ]
        # All waiting ops must have received an arrival before the next one may come.
        self._gates += [
            (after, before) for before, after in self._locks if self._channel_ops.gates(before.name) is not None
        ]
        self._by_name = actions
        compiled = [[actions[name] for name in lane.ops] for lane in self._lanes]
        self._arm(compiled)
        return compiled

    def _arm(self, compiled: list[list[_Action]]) -> None:
        """Fresh locks, all held: the op that is waited for releases its lock, the one that waits takes it again."""
        for actions in compiled:
            for action in actions:
                action.waits, action.wakes, action.gates = [], [], []
        for pairs, of_action in ((self._locks, "waits"), (self._gates, "gates")):
            for before, after in pairs:
                lock = threading.Lock()
                lock.acquire()
                before.wakes.append(lock)
                getattr(after, of_action).append(lock)

    def _run_lane(self, number: int, frame: Frame) -> None:
        values, numbers = frame.values, frame.numbers
        times = self._times[number] = []
        counters = self._counters
        name = ""
        try:
            with below_autograd():
                grad_mode = False
                for action in self._actions[number]:
                    for lock in action.waits:
                        lock.acquire()
                    if self._stop:
                        return
                    name = action.name
                    if action.grad_mode is not grad_mode:
                        grad_mode = action.grad_mode
                        torch._C._set_grad_enabled(grad_mode)
                    start = perf_counter_ns()
                    action.run(values, numbers)
                    times.append((start, perf_counter_ns()))
                    for lock in action.wakes:
                        lock.release()
                    for slot, users in action.shared:
                        if next(counters[slot]) == users:
                            values[slot] = None
        except BaseException as error:  # noqa: BLE001
            # The caller must see it, whichever thread it happened in; `run` raises it there.
            self._abort(name, error)

    def _run_channel(self, number: int, frame: Frame) -> None:
        """Begin the lane's transfers for this step, and for the next one those that may run ahead."""
        self._times[number] = []
        for step, locks in ((self._epoch, "waits"), (self._epoch + 1, "gates")):
            for action in self._actions[number]:
                if step > self._epoch and self._channel_ops.gates(action.name) is None:
                    continue
                for lock in getattr(action, locks):
                    lock.acquire()
                if self._stop:
                    return
                self._channel_ops.begin(action.name, step, self)

    def slot_value(self, slot: int) -> Any:
        return self._values[slot]

    def fill_slot(self, slot: int, value: Any) -> None:
        self._values[slot] = value

    def has_arrived(self, op: str, epoch: int) -> None:
        action, values = self._by_name[op], self._values
        for slot in action.frees if values else ():  # none: the step was left at this moment
            values[slot] = None
        for lock in action.wakes:
            with suppress(RuntimeError):  # the step was left at this moment
                lock.release()
        for slot, users in action.shared if values else ():
            if next(self._counters[slot]) == users:
                values[slot] = None

    def channel_failed(self, error: BaseException) -> None:
        self._abort("", error)

    def _abort(self, name: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (name, error)
        self._stop = True
        self._channel_ops.stop(error)
        for actions in self._actions:
            for action in actions:
                for lock in (*action.waits, *action.gates):
                    with suppress(RuntimeError):  # the op that is waited for ended at this moment
                        lock.release()

    def _failed(self) -> BaseException:
        assert self._failure is not None
        self.failed_op, error = self._failure
        self._failure = None
        self._stop = False
        self._arm(self._actions)
        action = self.captured.program.by_name.get(self.failed_op)
        if action is not None:
            error.add_note(f"in op {self.failed_op!r} of layer {action.layer!r} of the planned step")
        return error

    def _run_threads(self, frame: Frame) -> None:
        if self._pid != os.getpid():
            # First step, or the first one after a fork: threads do not come along into the child.
            self._start()
        finished: list[int] = []
        for queue in self._queues:
            queue.put((self, frame, finished))
        # The list holds the finished workers; the queue only wakes, since an interrupt may lose an item of it.
        while len(finished) < len(self._queues):
            try:
                self._done.get()
            except KeyboardInterrupt as interrupt:
                self._abort("", interrupt)

    def _start(self) -> None:
        width = torch.get_num_threads()
        self._done = SimpleQueue()
        self._queues = [SimpleQueue() for _ in self._lanes]
        self._pid = os.getpid()
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        problems = []
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        for number, (lane, queue) in enumerate(zip(self._lanes, self._queues, strict=True)):
            arguments = (number, lane.width, self._cpus[number], gpu, queue, self._done, ready)
            threading.Thread(target=_serve, args=arguments, name=f"hocket-{lane.name}", daemon=True).start()
            problems.append(ready.get())
        # `set_num_threads` in a lane also sets what threads that torch starts later begin with.
        torch.set_num_threads(width)
        if (problem := next(filter(None, problems), None)) is not None:
            self.close()
            raise problem


def _serve(
    number: int, width: int, cpus: set[int], gpu: int | None, inbox: _Inbox, done: SimpleQueue[int], ready: Any
) -> None:
    """The life of a lane's thread. While it waits it holds nothing of its executor, which may be forgotten."""
    problem: BaseException | None = None
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if gpu is not None:  # for ops that allocate on "cuda" without an index
            torch.cuda.set_device(gpu)
        # Asking first makes torch initialise this thread; otherwise the first op would undo the setting.
        torch.get_num_threads()
        torch.set_num_threads(width)
    except BaseException as error:  # noqa: BLE001 (raised by `_start`, in the caller's thread)
        problem = error
    ready.put(problem)
    del problem
    while (work := inbox.get()) is not None:
        lanes, frame, finished = work
        (lanes._run_lane if lanes._lanes[number].kind == "cores" else lanes._run_channel)(number, frame)
        del work, lanes, frame
        finished.append(number)
        done.put(number)
