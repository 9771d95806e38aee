"""The interface of an executor, and when the memory of each value goes back.

Who waits for whom is worked out in `hocket.ir.waits`, which every executor reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hocket.errors import StaleCaptureError
from hocket.ir import Lane, Plan, Synchronisation, Timeline, synchronisation
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.program import Program, Slot
from hocket.tracing.raising import is_other_branch
from hocket.tracing.scalars.tape import TapeRef


@dataclass(frozen=True)
class Releases:
    """When the memory of each value goes back."""

    frees: dict[str, tuple[int, ...]]  # op -> slots whose last reader it always is
    # slot -> ops that read or fill it, where none of them is always the last: each counts itself off, and who comes
    # last frees the slot
    shared: dict[int, tuple[str, ...]]


def arrivals_apart(plan: Plan) -> Plan:
    """The plan with a lane of its own for each channel op.

    A channel begins its transfers in the order of its lane, and they may arrive in any other: that one has arrived says
    nothing of those before it, so who needs both has to wait for both.

    Example:
        >>> from hocket.ir import Lane, Plan
        >>> plan = Plan((Lane("main", ("f", "g")), Lane("in", ("w1", "w2"), "channel", "server->cpu0")))
        >>> [lane.ops for lane in arrivals_apart(plan).lanes]
        [('f', 'g'), ('w1',), ('w2',)]
    """
    computing = [lane for lane in plan.lanes if lane.kind != "channel"]
    moving = [(lane.device, op) for lane in plan.lanes if lane.kind == "channel" for op in lane.ops]
    apart = [Lane(f"channel:{op}", (op,), "channel", device) for device, op in moving]
    return Plan((*computing, *apart), plan.after)


def releases(program: Program, sync: Synchronisation) -> Releases:
    """Work out, from what happens before what, who frees which slot.

    A channel op is over when it has arrived or was delivered. What was sent is freed then, or by its last reader here.
    """
    readers = program.readers()
    frees: dict[str, list[int]] = {}
    shared: dict[int, tuple[str, ...]] = {}
    for action in (program.prologue, *program.actions):
        for slot in action.fills:
            users = tuple(dict.fromkeys([action.name, *readers.get(slot, ())]))
            if action is program.prologue:  # comes before all others
                users = users[1:]
            if slot in program.kept or not users:
                continue
            last = sync.last_of(users)
            if last is None:
                shared[slot] = users
            else:
                frees.setdefault(last, []).append(slot)
    return Releases({op: tuple(slots) for op, slots in frees.items()}, shared)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops as they were traced: below autograd, in no grad mode unless an op sets it."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


class Executor(ABC):
    """Runs one plan of one captured step, again and again."""

    starts_with_prologue = False  # the executor makes the views of inputs itself, in `run`
    keeps_time = True  # it measures when the ops of every step ran
    num_first_runs = 1  # runs that are compared with eager before a plan counts as proven
    failure = ""  # why every op is called by itself where that is not what the executor is for. Empty if it is not so.
    failed_op = ""  # in the last step that raised
    # Gradients that a step had given when it raised, by slot, until `keep_effects` takes them.
    left: Mapping[int, Any] = MappingProxyType({})

    def __init__(self, captured: Captured, plan: Plan) -> None:
        self.captured = captured
        self.plan = plan
        self.sync = synchronisation(captured.graph, plan)

    def __call__(self, batch: Any) -> Any:
        """One training step on live parameters and state.

        Raises:
            StaleCaptureError: the step was captured under other numbers (a guard failed), or state that it needs is
                missing. Nothing was run.
            Exception: whatever an op raises, with the op and its layer in a note.
        """
        with self.undoing():
            frame = self.begin(batch)
            self.run(frame)
            return self.captured.finish(frame)

    def launched(self, batch: Any) -> Any:
        """One training step like a call, but every op is called by itself, whatever the executor has made of them."""
        return self(batch)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """While this lasts, a step that eager has to make in its place is undone, and raises."""
        undo = self.captured.trace.undo
        put_back = None if undo is None else undo.keep()
        self.failed_op, self.left = "", {}
        try:
            yield
        except Exception as error:
            if put_back is not None and (is_other_branch(error.args) or self._is_undone):
                put_back()
            raise

    @property
    def _is_undone(self) -> bool:
        """True if the last step has raised in an op whose error the user's step may catch, and was undone."""
        action = self.captured.program.by_name.get(self.failed_op)
        return self.captured.trace.undo is not None and action is not None and action.is_undone

    def begin(self, batch: Any) -> Frame:
        """Return the argument of `run` for this batch, for callers that act between the two. Raises as a call."""
        frame = self.captured.begin(batch, prologue=not self.starts_with_prologue)
        if frame is None:
            raise StaleCaptureError(f"the captured step does not stand for this one: {self.captured.why_not(batch)}")
        return frame

    @property
    def binding(self) -> Any:
        """The step bound to native code (see `hocket.execution.native.binding`), or None without such a form."""
        return None

    def annotate(self, error: BaseException) -> None:  # noqa: B027 (without direct calls there is nothing to note)
        """Note in an error of a direct call which op it came from."""

    def keep_effects(self, batch: Any) -> None:
        """Put in places of Python's what the step puts there before the op that raised.

        Its tensors are as eager leaves them already (`hocket.tracing.raising`), and gradients are those of `left`. What
        the step appends to a list is not appended.
        """
        left, self.left = self.left, {}
        action = self.captured.program.by_name.get(self.failed_op)
        if action is None or not action.effects_before:
            return
        frame = self.captured.begin(batch, prologue=False)
        for entry, value in action.effects_before.items():
            if isinstance(value, Slot):
                if left.get(value.index) is not None:
                    entry.set(left[value.index].detach())
            elif not isinstance(value, TapeRef):
                entry.set(value)
            elif frame is not None:
                entry.set(frame.numbers[value.index])

    def begun(self) -> Collection[str] | None:
        """Ops that have begun in the last step. None where that is not known."""
        return None

    def left_no_trace(self) -> bool:
        """True if a step that raised has written and drawn nothing that outlives it, so that eager can make it.

        An op that raises is the user's own error, and it has eager's effects on Python only where Python runs.
        """
        begun, graph = self.begun(), self.captured.graph
        freed = {buffer.name for buffer in graph.buffers if buffer.life == "step"}
        found = [graph.by_name.get(name) for name in begun or ()]
        lost = (op and (op.stateless or (op.writes and freed.issuperset(op.writes))) for op in found)
        return self._is_undone or (begun is not None and all(lost))

    @abstractmethod
    def run(self, frame: Any) -> None:
        """Run all ops on the values of `frame`."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """When each op of the last step ran."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory. A closed executor starts anew when it is called again."""
