"""`GraphedLanes`: a plan on streams, captured once as a CUDA graph and replayed.

A replay launches everything at once at little cost for the host. But a graph repeats the addresses and the numbers that
it was captured with. So

- the batch, and state that the step binds anew, are copied into tensors of the graph's own. Everything else has to keep
  its address, and the graph is captured again if it was replaced.
- ops that a graph cannot hold (`hocket.execution.streams.graph_parts`) are launched one by one, before or after it.

The capture belongs to the first run, so a schedule compares replays with ops that are launched one by one. Where a
capture fails, that is how all steps run from then on, and a schedule that sees it in the first runs stays eager. A step
at whose begin a gradient of the last replay is still in use, which the next one would write over, runs so, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from hocket.execution.streams.device import StreamDevice
from hocket.execution.streams.graph_parts import graph_parts, input_tensors
from hocket.execution.streams.lanes import Launch, StreamLanes, launch_plan_of
from hocket.ir import Plan, Timeline
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.raising import is_other_branch
from hocket.tracing.saved_state import copies_of, write_into
from hocket.tracing.sources import BatchLeaf, Gradient

log = logging.getLogger(__name__)

# Steps on copies before the capture: libraries choose their kernels and make their workspaces in them.
WARM_UP = 2
# Captures because something has another address, before everything is launched one by one.
MAX_CAPTURES = 8


class GraphedLanes(StreamLanes):
    """Runs a plan on streams as one CUDA graph. See `StreamLanes` for the arguments."""

    num_first_runs = 3  # whether a replay follows its inputs shows only after the first one

    def __init__(
        self, captured: Captured, plan: Plan, *, device: StreamDevice | None = None, timed: bool = False
    ) -> None:
        super().__init__(captured, plan, device=device, timed=timed)
        program, order = captured.program, self._whole.part.order
        parts = graph_parts(captured, self.device)
        self._before, self._inside, self._after = (
            Launch(self, launch_plan_of(program, captured.graph, plan, [op for op in order if op in ops]))
            for ops in (parts.before, parts.inside, parts.after)
        )
        late = set(program.kept).union(*(program.by_name[op].reads for op in parts.after))
        inside = set().union(*(program.by_name[op].reads for op in parts.inside))
        self._leaves_after = _filled(self, parts.after, set(program.kept))
        self._leaves_inside = _filled(self, parts.inside, late)
        self._leaves_before = _filled(self, parts.before, late | inside)
        bound = {source: slot for source, slot in (*captured.rebound, *captured.gradients) if slot is not None}
        tensors = input_tensors(captured)
        self._copied = {
            slot
            for slot, source in captured.inputs
            if slot in tensors and self.device.owns(tensors[slot])
            # A tensor that is written in place keeps its address, and must not be a copy.
            if type(source) is BatchLeaf or bound.get(source, slot) != slot
        }
        self._written_back = self._copied & captured.written_slots
        given = inside.intersection(self._leaves_before)
        self._copied |= given
        changed = {buffer for op in parts.inside for buffer in captured.graph[op].writes}
        if any(not changed.isdisjoint(captured.graph[op].writes) for op in parts.before):
            self._written_back |= given
        views = _views_of_inputs(captured)
        # Inputs of which the graph keeps the address. Ops outside of it find the others where they are.
        self._fixed = {slot for slot, _ in captured.inputs if slot not in self._copied and views[slot] & inside}
        self._results = {
            captured.lowered.slot_of[leaf] for kind, leaf in captured.trace.result.leaves if kind == "tensor"
        }
        # The next replay writes over the graph's memory. So the caller gets copies of results, and a place gets one if
        # its value is read after a replay, such as one that another place takes over.
        read = {source: views[slot] for slot, source in captured.inputs}
        taken = {slot for source, slot in bound.items() if read.get(source, set()) & late}
        self._handed_copies = (self._results | taken).intersection(self._leaves_inside)
        # The others, by how many places hold each when the next step begins: gradients that it does not read are gone.
        self._num_places = dict.fromkeys(bound.values(), 0)
        for source, slot in bound.items():
            self._num_places[slot] += source in read or type(source) is not Gradient
        self._is_warm = False
        self._num_captures = 0
        self._forget()

    def run(self, frame: Frame) -> None:
        if not self._is_warm:
            self._warm_up()
        self._start_time()
        if not self._inside.part.order:
            self._whole(frame)
            return
        self._launch(self._before, frame, self._leaves_before)
        if not (self._may_replay(frame) and self._has_replayed(frame)):
            self._launch(self._inside, frame, self._leaves_inside)
        self._launch(self._after, frame, self._leaves_after)
        for slot in self._handed_copies:
            frame.values[slot] = frame.values[slot].clone()

    def launched(self, batch: Any) -> Any:
        frame = self.begin(batch)
        self._whole(frame)
        return self.captured.finish(frame)

    def timeline(self) -> Timeline:
        """When each op ran in one further step, made on copies of everything by a graph that records events.

        The graph of the steps themselves records none: each costs about a microsecond. Needs a second step's memory.
        """
        if self.timed:
            return super().timeline()
        timed = GraphedLanes(self.captured, self.plan, device=self.device, timed=True)
        with self._random_numbers_kept():
            timed.run(self.captured.rehearse())
            found = timed.timeline()
        timed.close()
        return found

    def close(self) -> None:
        super().close()
        self._num_captures = 0
        self.failure = ""
        self._forget()

    def _forget(self) -> None:
        self._replay: Callable[[], None] | None = None
        self._seen: dict[int, tuple[int, ...]] = {}
        self._static: list[Any] = []
        self._given: dict[int, Any] = {}
        self._num_holders: dict[int, int] = {}

    def _warm_up(self) -> None:
        """Make a few steps on copies, launched one by one: nothing of the user's changes."""
        self._is_warm = True
        try:
            with self._random_numbers_kept():
                for _ in range(WARM_UP):
                    self._whole(self.captured.rehearse())
            self.device.synchronize()
        except Exception as error:  # noqa: BLE001  # such as too little memory for the copies
            if not is_other_branch(error.args):
                self._fail(error)

    def _random_numbers_kept(self) -> Any:
        index = self.device.index
        return torch.random.fork_rng(devices=[] if index is None else [index])

    def _may_replay(self, frame: Frame) -> bool:
        """Return True if a replay may make this step, after a capture if it needs one."""
        if self.failure:
            return False
        if self._replay is not None and not self._moved(frame):
            return not self._is_held_elsewhere()
        try:
            self._num_captures += 1
            if self._num_captures > MAX_CAPTURES:
                raise RuntimeError(f"tensors of the step had other addresses {MAX_CAPTURES} times")
            self._capture(frame)
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing of the step has run
            self._fail(error)
            return False
        return True

    def _has_replayed(self, frame: Frame) -> bool:
        """Replay the graph, or return False if the device refuses to launch it. Then no op of it has run."""
        assert self._replay is not None
        for slot in self._copied:  # what may be another tensor in each step, to where the graph reads it
            write_into(self._static[slot], frame.values[slot])
        try:
            self._replay()
        except Exception as error:  # noqa: BLE001  # an error of an earlier op is raised by the next launch as well
            self._fail(error)
            return False
        self._hand_over(frame)
        return True

    def _fail(self, error: Exception) -> None:
        self._forget()
        self.failure = f"{type(error).__name__}: {error}"
        log.info("hocket: the step's ops are launched one by one, without a CUDA graph: %s", self.failure)

    def _launch(self, launch: Launch, frame: Frame, leaves: tuple[int, ...]) -> None:
        """Launch the ops of one part one by one, and keep what others need of them."""
        if not launch.part.order:
            return
        kept = dict.fromkeys(leaves)
        launch(Frame(_Keeping(frame.values, kept), frame.numbers))
        for slot, value in kept.items():
            frame.values[slot] = value

    def _hand_over(self, frame: Frame) -> None:
        """Give what the graph has made to ops after it and to the caller."""
        for slot in self._written_back:
            write_into(frame.values[slot], self._static[slot])
        for slot, given in self._given.items():
            if slot in self._num_places and slot not in self._handed_copies:
                self._num_holders[slot] = num_holders(given) + self._num_places[slot]
                frame.values[slot] = given.data  # unlike `detach` no view, of which each place would get its own
            else:
                frame.values[slot] = given

    def _moved(self, frame: Frame) -> bool:
        return any(_where(frame.values[slot]) != seen for slot, seen in self._seen.items())

    def _is_held_elsewhere(self) -> bool:
        """Return True if a gradient or another value of the last replay is still in use."""
        return any(num_holders(self._given[slot]) > count for slot, count in self._num_holders.items())

    def _capture(self, frame: Frame) -> None:
        captured = self.captured
        self._forget()
        values = list(frame.values)
        given = [values[slot] for slot in self._copied]
        for slot, copy in zip(self._copied, copies_of(given), strict=True):
            values[slot] = copy
        # Views of what is copied must be views of the copy.
        captured._started(values, frame.numbers)
        self._seen = {slot: _where(values[slot]) for slot in self._fixed}
        self._given = dict.fromkeys(self._leaves_inside)
        static = Frame(_Keeping(values, self._given), frame.numbers)
        self._replay = self.device.graph(lambda: self._inside(static))
        self._static = values


class _Keeping(list[Any]):
    """Slots that remember what was put into some of them, also when a launch has dropped it: others read it later."""

    def __init__(self, values: list[Any], keep: dict[int, Any]) -> None:
        super().__init__(values)
        self._keep = keep

    def __setitem__(self, slot: Any, value: Any) -> None:
        if value is not None and slot in self._keep:
            self._keep[slot] = value
        super().__setitem__(slot, value)


def as_launched(captured: Captured, plan: Plan, device: StreamDevice) -> tuple[Plan, frozenset[str]]:
    """`plan` as `GraphedLanes` runs it, for a simulation, and the ops that stay outside of the graph.

    On each lane those come first that run before the graph, and last those that begin when the graph has ended. Where
    nothing is left for a graph the plan is as it was.
    """
    parts = graph_parts(captured, device)
    outside = parts.before | parts.after
    if not outside or not parts.inside:
        return plan, outside
    place = {op: number for number, ops in enumerate((parts.before, parts.inside, parts.after)) for op in ops}
    groups = [[tuple(op for op in lane.ops if place[op] == number) for lane in plan.lanes] for number in range(3)]
    # A wait of the plan's own (for memory) is not kept across the graph's ends.
    after = {op: tuple(o for o in others if place[o] <= place[op]) for op, others in plan.after.items()}
    ends: tuple[str, ...] = ()
    for group in groups:
        if ends:
            after |= {ops[0]: (*after.get(ops[0], ()), *ends) for ops in group if ops}
        ends = tuple(ops[-1] for ops in group if ops) or ends
    lanes = tuple(replace(lane, ops=sum(ops, ())) for lane, *ops in zip(plan.lanes, *groups, strict=True))
    return replace(plan, lanes=lanes, after={op: others for op, others in after.items() if others}), outside


def _filled(lanes: StreamLanes, ops: Iterable[str], needed: set[int]) -> tuple[int, ...]:
    """The slots that these ops fill and that are needed after them."""
    by_name = lanes.captured.program.by_name
    return tuple(sorted({slot for op in ops for slot in by_name[op].fills} & needed))


def _views_of_inputs(captured: Captured) -> dict[int, set[int]]:
    """By the slot of each input: itself, and the views of it that are made at the begin of a step."""
    found = {slot: {slot} for slot, _ in captured.inputs}
    for call in captured.program.prologue.calls:
        for views in found.values():
            if not views.isdisjoint(call.reads):
                views.update(call.outs.values())
    return found


def num_holders(tensor: torch.Tensor) -> int:
    """Count the tensors that hold the memory of this one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _where(value: Any) -> tuple[int, ...]:
    return (value.data_ptr(), *value.stride()) if isinstance(value, torch.Tensor) else ()
