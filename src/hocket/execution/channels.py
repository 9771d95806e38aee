r"""Channel lanes: asynchronous ops that begin, arrive later, and can fail.

A lane of kind ``channel`` has no core. A thread that mostly sleeps begins its ops in the lane's order, each as soon as
its dependencies are done. That thread does not wait for arrivals: the ops that need a value wait for it, asleep::

    lane     begin w1 | begin w2 | ... done: begin w1 of the next step (as soon as the last op that touches it is done)
    channel  ====== w1 =======|===== w2 =====|
    core                       [ f1(w1) ]     [ f2 ]

A receive into memory that outlives the step may run one step ahead. Arrivals are counted, and a step waits for a count
of *at least* its own number, since the next arrival may be there already.

A send from memory of the step (a gradient) may run one step behind. For its step it is over once it has begun, since
the channel holds the memory and the next step allocates its own. The next step ends only after the delivery.

After a failed channel or an interrupted step the state of transfers is unknown, and the executor runs no further step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from hocket.errors import ExecutionError
from hocket.execution.base import below_autograd
from hocket.ir import Plan, Span
from hocket.tracing.captured import Captured
from hocket.tracing.program import Transfer, compile_action

# Called once, from any thread, when a transfer has arrived (or, of a send, was delivered), or with why it never will.
Done = Callable[[BaseException | None], None]


class Channel(Protocol):
    """Transport of the values of a channel lane."""

    runs_ahead: bool  # a receive may begin one step ahead
    runs_behind: bool  # a send may be delivered one step behind

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Begin to send `tensor`, or to receive into it, without waiting. Nothing else uses it until `done` is called.

        `epoch` is the number of the step, from 1 on. An op is begun once per step, in order. If it runs behind, the one
        before may not have been delivered yet. `done` is called when it has arrived or failed.
        """


class Host(Protocol):
    """The executor whose step channel ops belong to."""

    def slot_value(self, slot: int) -> Any:
        """Return the value in a slot of the step in progress."""

    def fill_slot(self, slot: int, value: Any) -> None:
        """Put the memory of a received value into its slot."""

    def has_arrived(self, op: str, epoch: int) -> None:
        """Free values that an arrived op was the last to need. Called from any thread, before the step may end."""

    def channel_failed(self, error: BaseException) -> None:
        """Record that a channel has failed. Called from any thread."""


class ChannelOps:
    """The channel ops of a plan: begins them, and knows which have arrived. Each lane of such ops needs its channel."""

    def __init__(self, captured: Captured, plan: Plan, channels: Mapping[str, Channel]) -> None:
        self.lanes = [lane for lane in plan.lanes if lane.kind == "channel" and lane.ops]
        self._transfers = _checked(captured, plan, channels)
        self._channels = {op: channels[lane.device] for lane in self.lanes for op in lane.ops}
        self._inputs = captured.program.inputs
        self._views = {op: compile_action(captured.program.by_name[op]) for op in self._transfers}
        self._changed = threading.Condition()
        self._begun = dict.fromkeys(self._channels, 0)
        self._delivered = dict.fromkeys(self._channels, 0)
        self._arrived = dict.fromkeys(self._channels, 0)
        self._times: dict[tuple[str, int], list[int]] = {}
        self.failure: BaseException | None = None
        # Ops that must complete before the next value is received into memory that outlives the step.
        touching: dict[str, list[str]] = {}
        for before, after in captured.graph.carried:
            touching.setdefault(after, []).append(before)
        self._gates = {
            op: tuple(touching.get(op, ()))
            for op, transfer in self._transfers.items()
            if self._channels[op].runs_ahead and not transfer.sends and transfer.new is None
        }

        lasting = {before for before, _ in captured.graph.carried}
        self._behind = frozenset(
            op
            for op, transfer in self._transfers.items()
            if self._channels[op].runs_behind and transfer.sends and op not in lasting
        )

    def gates(self, op: str) -> tuple[str, ...] | None:
        """Return the ops of a step that must be over before `op` may begin for the next one, or None for all."""
        return self._gates.get(op)

    def begin(self, op: str, epoch: int, host: Host) -> None:
        """Begin `op` for a step of `host`, unless it was begun one step ahead."""
        with self._changed:
            if self.failure is not None or self._begun[op] >= epoch:
                return
            self._begun[op] = epoch
            self._times[op, epoch] = [perf_counter_ns(), 0]
        try:
            self._channels[op].begin(op, self._tensor(op, host), epoch, partial(self._done, op, epoch, host))
        except Exception as error:  # noqa: BLE001 (of the channel: the step ends with it)
            self._done(op, epoch, host, error)
        if op in self._behind and self.failure is None:
            self._is_over(op, epoch, host)

    def wait(self, epoch: int) -> None:
        """Sleep until all ops of a step are over, and those that may run behind were delivered for the one before."""
        self._wait(lambda: self._reached(self._arrived, epoch) and self._reached(self._delivered, epoch - 1))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or is_over())
            if self.failure is not None:
                raise self.failure

    @staticmethod
    def _reached(counts: Mapping[str, int], epoch: int) -> bool:
        return all(count >= epoch for count in counts.values())

    def stop(self, error: BaseException) -> None:
        """A step was left: no further one can be run, where there are channels."""
        with self._changed:
            if self.failure is None and self.lanes:
                self.failure = ExecutionError(
                    f"a step was left while transfers were under way ({type(error).__name__}: {error}); make a new "
                    "executor, with new channels"
                )
            self._changed.notify_all()

    def spans(self, epoch: int, began_ns: int) -> Iterator[Span]:
        """Return the span of each op: from its begin, or the arrival before it on its lane, to its arrival.

        Spans of ops that began one step ahead start with the step at `began_ns`. Ops that run behind are waited for.
        """
        if self.failure is None:
            self._wait(lambda: self._reached(self._delivered, epoch))
        for lane in self.lanes:
            free_us = 0.0
            for op in lane.ops:
                begun_ns, arrived_ns = self._times.get((op, epoch), (0, 0))
                if arrived_ns:
                    start_us = max(free_us, (begun_ns - began_ns) / 1000)
                    free_us = max(start_us, (arrived_ns - began_ns) / 1000)
                    yield Span(op, lane.name, start_us, free_us)

    def _tensor(self, op: str, host: Host) -> torch.Tensor:
        transfer = self._transfers[op]
        if transfer.new is not None:
            shape, strides, dtype, device = transfer.new
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            values: Any = {transfer.slot: made}
            with below_autograd():
                self._views[op](values, [])  # of its memory: what is in it need not be there yet
            for slot, value in values.items():
                host.fill_slot(slot, value)
            return made
        source = self._inputs.get(transfer.slot)
        found: torch.Tensor
        if source is not None and source.kind != "batch":  # the same memory in every step: the next one's, too
            found = source.get()
        else:
            found = host.slot_value(transfer.slot)
        return found.detach()

    def _done(self, op: str, epoch: int, host: Host, error: BaseException | None) -> None:
        with self._changed:
            if self.failure is not None or self._delivered[op] >= epoch:
                return
            if error is None:
                self._times[op, epoch][1] = perf_counter_ns()
                self._times.pop((op, epoch - 2), None)
                self._delivered[op] = epoch
            else:
                transfer = self._transfers[op]
                way = "to" if transfer.sends else "from"
                self.failure = ExecutionError(
                    f"channel op {op!r} {way} {transfer.peer!r} failed: {type(error).__name__}: {error}"
                )
                self.failure.__cause__ = error
        if error is not None:
            assert self.failure is not None
            host.channel_failed(self.failure)
        elif op not in self._behind:
            self._is_over(op, epoch, host)
        with self._changed:
            self._changed.notify_all()

    def _is_over(self, op: str, epoch: int, host: Host) -> None:
        """Mark an op as over for the step. Not called after the step's end, since it frees values of the step."""
        host.has_arrived(op, epoch)
        with self._changed:
            self._arrived[op] = epoch
            self._changed.notify_all()


def _checked(captured: Captured, plan: Plan, channels: Mapping[str, Channel]) -> dict[str, Transfer]:
    """The transfers of all channel lanes."""
    found: dict[str, Transfer] = {}
    for lane in plan.lanes:
        for op in lane.ops:
            action = captured.program.by_name.get(op)
            if action is None:
                continue  # the plan is refused for it by name
            if (action.transfer is None) == (lane.kind == "channel"):
                wrong = "computes" if action.transfer is None else "is a transfer"
                raise ExecutionError(f"op {op!r} {wrong}, and lane {lane.name!r} is of kind {lane.kind}")
            if action.transfer is not None:
                if lane.device not in channels:
                    raise ExecutionError(f"lane {lane.name!r}: there is no channel for {lane.device!r}")
                found[op] = action.transfer
    return found
