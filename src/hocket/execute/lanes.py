r"""The interface of an executor, and what every executor has to know of a plan: who waits for whom.

A lane runs its ops in order, so a wait is needed only where an edge crosses lanes, and not even there when an earlier
wait already implies it. That is decided with vector clocks (Fidge 1988, Mattern 1989): each op knows how far every
lane has got when it ends::

    lane 0   a ------- c ------- e        e waits for d, and d came after b: no wait of e for b
              \                 /
    lane 1     b ------------- d          d follows b on its lane: no wait at all
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hocket.capture.captured import Captured
from hocket.capture.program import Program
from hocket.errors import PlanError, StaleCaptureError
from hocket.ir import Graph, Plan, Timeline

__all__ = ["Executor", "Releases", "Synchronisation", "below_autograd", "releases", "synchronisation"]


@dataclass(frozen=True)
class Synchronisation:
    """Which waits a plan needs, and what happens before what.

    Attributes:
        waits: op -> ops on other lanes that it has to wait for; nothing that is implied by another wait.
        clocks: op -> how many ops of each lane are finished when it ends.
        place: op -> (lane, position on it).
    """

    waits: dict[str, tuple[str, ...]]
    clocks: dict[str, tuple[int, ...]]
    place: dict[str, tuple[int, int]]

    def before(self, first: str, second: str) -> bool:
        """Whether `first` has always finished when `second` ends (an op counts as before itself)."""
        lane, position = self.place[first]
        return self.clocks[second][lane] > position

    def last_of(self, ops: Iterable[str]) -> str | None:
        """The one of `ops` that always ends after all the others, if there is one."""
        found = list(ops)
        last = max(found, key=lambda op: sum(self.clocks[op]))
        return last if all(self.before(op, last) for op in found) else None


def synchronisation(graph: Graph, plan: Plan) -> Synchronisation:
    """Work out the waits of a plan.

    Raises:
        PlanError: the plan does not run every op of the graph once, or its lanes wait for each other in a circle.
    """
    place = {op: (number, at) for number, lane in enumerate(plan.lanes) for at, op in enumerate(lane.ops)}
    for op in graph.ops:
        if op.name not in place:
            raise PlanError(f"the plan does not run op {op.name!r}", op=op.name)
    for name in place:
        if name not in graph.by_name:
            raise PlanError(f"the plan runs op {name!r}, which the graph does not have", op=name)
    reached = [0] * len(plan.lanes)
    current = [(0,) * len(plan.lanes)] * len(plan.lanes)
    clocks: dict[str, tuple[int, ...]] = {}
    waits: dict[str, tuple[str, ...]] = {}
    progress = True
    while progress:
        progress = False
        for number, lane in enumerate(plan.lanes):
            while reached[number] < len(lane.ops):
                name = lane.ops[reached[number]]
                needed = (*graph.predecessors[name], *plan.after.get(name, ()))
                if any(before not in clocks for before in needed):
                    break
                clock, waited = _join(current[number], needed, number, clocks, place)
                reached[number] += 1
                current[number] = clocks[name] = (*clock[:number], reached[number], *clock[number + 1 :])
                if waited:
                    waits[name] = waited
                progress = True
    for number, lane in enumerate(plan.lanes):
        if reached[number] < len(lane.ops):
            name = lane.ops[reached[number]]
            needed = (*graph.predecessors[name], *plan.after.get(name, ()))
            missing = next(before for before in needed if before not in clocks)
            raise PlanError(
                f"lane {lane.name!r} stops at op {name!r}: it waits for {missing!r}, which cannot run before it",
                op=name,
                lane=lane.name,
            )
    return Synchronisation(waits, clocks, place)


def _join(
    clock: tuple[int, ...],
    needed: Iterable[str],
    number: int,
    clocks: dict[str, tuple[int, ...]],
    place: dict[str, tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    waited = []
    # Latest first, so that one wait may imply the others.
    for before in sorted(needed, key=lambda op: sum(clocks[op]), reverse=True):
        lane, position = place[before]
        if lane != number and clock[lane] <= position:
            waited.append(before)
            clock = tuple(map(max, clock, clocks[before]))
    return clock, tuple(waited)


@dataclass(frozen=True)
class Releases:
    """When the memory of each value goes back.

    Attributes:
        frees: op -> slots whose last reader it always is.
        shared: slot -> ops that read or fill it, where none of them is always the last: each counts itself off, and
            who comes last frees the slot.
    """

    frees: dict[str, tuple[int, ...]]
    shared: dict[int, tuple[str, ...]]


def releases(program: Program, sync: Synchronisation) -> Releases:
    """Work out, from what happens before what, who frees which slot."""
    readers = program.readers()
    frees: dict[str, list[int]] = {}
    shared: dict[int, tuple[str, ...]] = {}
    for action in program.actions:
        for slot in action.fills:
            if slot in program.kept:
                continue
            users = tuple(dict.fromkeys([action.name, *readers.get(slot, ())]))
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
    """Runs one plan of one captured step, again and again.

    `starts_with_prologue` says that the executor makes the views of inputs itself, in `run`.
    """

    starts_with_prologue = False

    def __init__(self, captured: Captured, plan: Plan, graph: Graph | None = None) -> None:
        self.captured = captured
        self.plan = plan
        self.sync = synchronisation(graph or captured.graph, plan)

    def __call__(self, batch: Any) -> Any:
        """One training step on live parameters and state.

        Raises:
            StaleCaptureError: the step was captured under other numbers (a guard failed); nothing was run.
            ExecutionError: state that the step needs is missing.
            Exception: whatever an op raises, with the op and its layer in a note.
        """
        frame = self.captured.begin(batch, prologue=not self.starts_with_prologue)
        if frame is None:
            raise StaleCaptureError("a number that the step branches on has changed; capture the step again")
        self.run(frame)
        return self.captured.finish(frame)

    @abstractmethod
    def run(self, frame: Any) -> None:
        """Run all ops on the values of `frame`."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """When each op of the last step ran."""

    @abstractmethod
    def close(self) -> None:
        """Give threads and memory back; a closed executor starts anew when it is called again."""
