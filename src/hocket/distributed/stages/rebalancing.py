r"""`Rebalancer`: measures a rank's steps, and decides by the measurements of all ranks which ops move.

Rank 0 makes the rules (`hocket.adaptation`): profiled ops, flows, and units that move together. After every few steps
all ranks exchange the use of their cores by all processes, and the ratio of measured to planned op times. Each makes
the same decision. After a decision to leave all ops, the next search waits until some measurement differs, by more
each time, since a search costs as much as a step of a large model.

`migrated` lets ops change rank between two steps, with all state whose home they change. Every rank has the whole
captured step, so each makes its new part by itself, and all compare their plans::

    divide again, check all parts | add packets | compare | state to its new homes | release other memory

Before a migration no transfer is under way, so each value has one home, and copies elsewhere are current. Gradients do
not move, since a step drops those that it finds. The generator's state is the same everywhere after each step. Numbers
of Python that a step reads are refused when a job begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hocket.adaptation import AssistantRules, DeviceShare, OpMove, assistant_rules, decide, shares_of
from hocket.adaptation.assistant_rules import RESOURCES, RuledFlow, RuledOp
from hocket.adaptation.assistants import order_of, predicted_step_us, transfer_delay
from hocket.adaptation.cpu_use import CpuUse
from hocket.adaptation.units import units_of
from hocket.distributed.packets import Packet
from hocket.distributed.stages.crossings import Borders, joined_plan, rank_name
from hocket.distributed.stages.stage_job import StageJob, divided, trimmed
from hocket.distributed.state import ShardState
from hocket.errors import InputError, PeerError, PlanError
from hocket.ir import Costs, Graph, Machine, Timeline

READY = "ready"


class MovedOps(NamedTuple):
    """Ops that moved together from one rank to another."""

    ops: tuple[str, ...]
    source: int
    target: int


@dataclass(frozen=True)
class Migration:
    """Ops and state that moved between two steps of a job.

    Example:
        >>> print(Migration(20, (MovedOps(("mm", "add"), 1, 0),), 4096, 2e4, "rank1 is slow"))
        after step 20: 2 ops ('mm', ...) from rank1 to rank0, 4,096 bytes of state, in 20.0 ms: rank1 is slow
    """

    step: int  # number of steps before
    moved: tuple[MovedOps, ...]  # ops, with their old and new ranks
    size_bytes: int  # parameters, buffers and optimizer state that moved, over all ranks
    took_us: float  # duration at this rank
    why: str  # the measurements behind the decision
    refused: str = ""  # the reason why the ops stayed where they were, or empty if they moved

    def __str__(self) -> str:
        moved = "; ".join(
            f"{len(ops)} op{'s' * (len(ops) > 1)} ({ops[0]!r}{', ...' * (len(ops) > 1)}) from {rank_name(source)} to "
            f"{rank_name(target)}"
            for ops, source, target in self.moved
        )
        if self.refused:
            return f"after step {self.step}: not moved: {moved}: {self.refused}"
        return (
            f"after step {self.step}: {moved}, {self.size_bytes:,} bytes of state, in {self.took_us / 1000:.1f} ms: "
            f"{self.why}"
        )


def divided_again(job: StageJob, rank_of: Mapping[str, int], order: Sequence[str]) -> StageJob:
    """The job after a migration that has not happened yet. Raises as `divided`."""
    since, borders = job.since + 1, Borders(job.captured)
    borders.check(rank_of, job.num_ranks)
    width = next(lane.width for lane in job.plan.lanes if lane.kind == "cores")
    crossings = borders.crossings(rank_of, job.num_ranks, since)
    plan = joined_plan(job.captured.graph, order, rank_of, crossings, width)
    return divided(job, borders, plan, job.memory, all_parts=True, since=since)


def migrated(before: StageJob, after: StageJob) -> tuple[StageJob, int]:
    """Move all state to its new home. Every rank calls this at the same time, while nothing runs or is under way.

    Returns the new job, and the number of bytes of state that went from one rank to another.
    """
    here = before.rank
    arriving = {rank: _arriving(before, after, rank) for rank in range(before.num_ranks)}

    def moving(source: int, target: int) -> ShardState:
        entries = tuple(after.entries[name] for name in arriving[target].get(source, ()))
        return ShardState(target, entries, f"moved~{after.since}/")

    for rank, wire in after.wires.items():
        outgoing = [*after.step_packets(here, rank), *_packets(after, moving(here, rank))]
        incoming = [*after.step_packets(rank, here), *_packets(after, moving(rank, here))]
        if rank == 0:
            outgoing += _packets(after, after.homed_at(here))
        if here == 0:
            incoming += _packets(after, after.homed_at(rank))
        wire.add(outgoing, incoming)
    compare_plans(before, after.plan_digest)
    after.memory.restore(after.kept)
    for rank, wire in after.wires.items():
        moving(here, rank).post(wire)
    for rank, wire in after.wires.items():
        moving(rank, here).receive(wire)
    after.memory.keep(after.kept)
    moved = sum(after.memory.size_bytes(name) for of in arriving.values() for names in of.values() for name in names)
    return trimmed(after), moved


def compare_plans(job: StageJob, digest: int) -> None:
    """Wait until all ranks have reached this point, and check that they have made the same plan.

    `digest` is that of the plan, or 0 if ops do not move.
    """
    mine = torch.tensor([digest], dtype=torch.int64)
    for rank, theirs in job.exchanged(READY, mine).items():
        if not torch.equal(theirs, mine):
            raise PeerError(
                f"{job.membership.me} moves ops to other places than {job.membership.name(rank)}: all ranks decide by "
                "the same numbers"
            )


def _arriving(before: StageJob, after: StageJob, rank: int) -> dict[int, list[str]]:
    """Names of state that a rank receives, by source: state that changes its home to it, and state that it lacked.

    Values that the home sends in each step come as at the beginning (`RunningPart`).
    """
    kept_before, kept_after = before.kept_at(rank), after.kept_at(rank)
    copied = {each.buffer for each in after.crossings if each.lasts and each.to == rank}
    found: dict[int, list[str]] = {}
    for name in after.entries:
        source = before.home_of[name]
        becomes_home = after.home_of[name] == rank != source
        if name in kept_after and (becomes_home or name not in kept_before | copied):
            found.setdefault(source, []).append(name)
    return found


def _packets(job: StageJob, state: ShardState) -> list[Packet]:
    """One packet for each tensor, of its size when it has memory."""
    return [Packet((state.name_of(entry),), (job.memory.size_bytes(entry.name),)) for entry in state.tensors]


SHARES = "shares"
# The use of three resources, measured over planned op time, and the step time.
NUM_SHARES = len(RESOURCES) + 2
# Number of steps measured before each decision: one of them may have been disturbed.
MEASURED_STEPS = 5
# Relative change of a rank's speed after which ops may move again, doubled after each decision to leave all ops.
SAME = 0.1


class Rebalancer:
    """Decides which ops move. All ranks make the same decision."""

    def __init__(self, rules: AssistantRules, rank: int, every_steps: int) -> None:
        self.rules = rules
        self.shares: tuple[DeviceShare, ...] = ()  # measurements of all ranks at the last decision
        self._rank, self._every_steps = rank, every_steps
        self._timelines: list[Timeline] = []
        self._slowdown = 1.0
        self._moved_at = 0
        self._left: tuple[DeviceShare, ...] = ()
        self._times_left = 0
        self._cpus = CpuUse()

    def note(self, steps: int, timeline: Callable[[], Timeline]) -> None:
        """Record that step number `steps` has run. Its timeline is read if a decision follows soon.

        The first `every_steps` steps are warm-up.
        """
        if steps == self._every_steps:
            self._cpus.since_last()
        elif steps > self._every_steps and -steps % self._every_steps < MEASURED_STEPS:
            self._timelines.append(timeline())

    def is_due(self, steps: int) -> bool:
        """True if all ranks decide before the next step."""
        return bool(self._timelines) and steps % self._every_steps == 0

    def moves(self, job: StageJob, steps: int) -> tuple[OpMove, ...]:
        """Decide which ops move now, mostly none. Every rank calls it at the same time."""
        mine = self._measured(steps)
        numbers = [*map(mine.of, RESOURCES), mine.slowdown, mine.step_us]
        measured = job.exchanged(SHARES, torch.tensor(numbers, dtype=torch.float64))
        self.shares = tuple(
            DeviceShare(compute, memory, network, slowdown, mine.steps, step_us)
            for compute, memory, network, slowdown, step_us in (values.tolist() for values in measured.values())
        )
        if mine.steps < self.rules.settle_steps or (self._left and self._is_like(self._left)):
            return ()
        found = decide(self.shares, self.rules, self._assignment(job.rank_of))
        if not found:
            self.leave()
        return found

    def leave(self) -> None:
        """Record the decision to leave all ops where they are, by the last measurements."""
        self._times_left = self._times_left + 1 if self._left and self._has_same_overload(self._left) else 0
        self._left = self.shares

    def begin(self, steps: int) -> None:
        """Begin new measurements, after ops have moved."""
        self._moved_at, self._timelines, self._left = steps, [], ()
        self._cpus.since_last()

    def placed(self, moves: Sequence[OpMove], rank_of: Mapping[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
        """The rank of each op after some moves, and the order in which ranks run them."""
        after = dict(rank_of) | {self.rules.ops[move.op].name: move.target for move in moves}
        delay = transfer_delay(self.shares, self.rules, self._assignment(rank_of))
        order = order_of(self.rules, self._assignment(after), [share.slowdown for share in self.shares], delay)
        return after, tuple(self.rules.ops[position].name for position in order)

    def as_units(self, moves: Sequence[OpMove]) -> tuple[MovedOps, ...]:
        """The moves, with the ops of each unit together."""
        found: dict[tuple[int, int, int], list[str]] = {}
        for op, source, target in moves:
            found.setdefault((self.rules.unit_of[op], source, target), []).append(self.rules.ops[op].name)
        return tuple(MovedOps(tuple(ops), source, target) for (_, source, target), ops in found.items())

    def why(self, before: Mapping[str, int], after: Mapping[str, int]) -> str:
        """The measurements behind a decision, as text."""
        slowdown = [share.slowdown for share in self.shares]
        delay = transfer_delay(self.shares, self.rules, self._assignment(before))
        was, becomes = (
            predicted_step_us(self.rules, self._assignment(rank_of), slowdown, delay) / 1000
            for rank_of in (before, after)
        )
        ranks = ", ".join(
            f"{name} {share.compute:.2f} used and {share.slowdown:.2f} of the planned time"
            for name, share in zip(self.rules.devices, self.shares, strict=True)
        )
        return f"{ranks}, transfers {delay:.1f}; predicted step {was:.1f} ms before, {becomes:.1f} ms after"

    def _measured(self, steps: int) -> DeviceShare:
        """The measurements of this rank, from the recorded step in which its ops took the median time."""
        here = rank_name(self._rank)
        took_us = [sum(s.duration_us for s in t.spans if s.lane == here) for t in self._timelines]
        median = sorted(range(len(took_us)), key=took_us.__getitem__)[len(took_us) // 2]
        step_us = sorted(timeline.makespan_us for timeline in self._timelines)[len(took_us) // 2]
        used = self._cpus.since_last()
        activity = None if used is None else {here: used}
        share = shares_of(self._timelines[median], self.rules, activity=activity, steps=steps - self._moved_at)[
            self._rank
        ]
        if took_us[median]:
            self._slowdown = share.slowdown
        self._timelines = []
        # A rank without ops keeps its last slowdown.
        return dataclasses.replace(share, slowdown=self._slowdown, step_us=step_us)

    def _is_like(self, before: Sequence[DeviceShare]) -> bool:
        """True if the same devices are overloaded, and no device is much slower or faster than before."""
        much = SAME * 2.0**self._times_left
        return self._has_same_overload(before) and all(
            abs(now.slowdown - then.slowdown) <= much * then.slowdown
            for now, then in zip(self.shares, before, strict=True)
        )

    def _has_same_overload(self, before: Sequence[DeviceShare]) -> bool:
        theta = self.rules.theta
        return all(
            (now.of(resource) > theta) == (then.of(resource) > theta)
            for now, then in zip(self.shares, before, strict=True)
            for resource in RESOURCES
        )

    def _assignment(self, rank_of: Mapping[str, int]) -> list[int]:
        return [rank_of[op.name] for op in self.rules.ops]


def rebalanced(
    rebalancer: Rebalancer, job: StageJob, steps: int, stop: Callable[[], None]
) -> tuple[StageJob, Migration | None]:
    """Measure, decide, and move ops, once `stop` has waited for all transfers. Every rank calls it at the same time.

    Returns the new job, or the same one if no op has moved, and the migration or its refusal, if one was decided.
    """
    if not (moves := rebalancer.moves(job, steps)):
        return job, None
    rank_of, order = rebalancer.placed(moves, job.rank_of)
    planned = Migration(steps, rebalancer.as_units(moves), 0, 0.0, rebalancer.why(job.rank_of, rank_of))
    try:
        after = divided_again(job, rank_of, order)
    except (InputError, PlanError) as error:
        compare_plans(job, 0)  # all ranks refuse
        rebalancer.leave()
        return job, dataclasses.replace(planned, refused=str(error))
    stop()
    after, size_bytes = migrated(job, after)
    return after, dataclasses.replace(planned, size_bytes=size_bytes)


def made_rules(
    graph: Graph, costs: Costs, machine: Machine, together: Sequence[Sequence[str]], migration_us: float
) -> AssistantRules:
    """Make the rules at rank 0: a device for each rank, and ops in units that may move."""
    width = machine.devices[0].cores
    takes_us = {op.name: costs.duration_us(op.name, width=width) for op in graph.ops}
    units = units_of(graph, takes_us, together)
    return assistant_rules(graph, costs, machine, units=units, migration_us=migration_us)


def rules_from(document: Mapping[str, Any], graph: Graph, num_ranks: int) -> AssistantRules:
    """Read the rules that rank 0 announces, the fields of `AssistantRules`, for this step and this number of ranks."""
    try:
        numbers = dict(document)
        devices, ops, flows = (numbers.pop(key) for key in ("devices", "ops", "flows"))
        made = [RuledOp(name, resource, tuple(takes_us), *others) for name, resource, takes_us, *others in ops]
        rules = AssistantRules(tuple(devices), tuple(made), tuple(RuledFlow(*flow) for flow in flows), **numbers)
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise PeerError(f"rank 0 announced malformed rules: {error}") from error
    if {op.name for op in rules.ops} != set(graph.by_name) or len(rules.devices) != num_ranks:
        raise PeerError("rank 0 announced rules of another step")
    return rules
