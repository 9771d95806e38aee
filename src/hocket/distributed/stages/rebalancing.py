"""What a rank measures of its own steps, and which ops move by what all ranks have measured.

Rank 0 writes the rules (`hocket.adaptation`): ops with what they were profiled at, flows, units that move as one. Every
so many steps all ranks tell each other how much of their cores was used, by anybody, and how long their ops took over
what was planned; and each makes the same decision. Where that was to leave all ops, it is not asked again until some
number is another one, by more each time: the search costs as much as a step of a large model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hocket.adaptation import AssistantRules, DeviceShare, OpMove, assistant_rules, decide, shares_of
from hocket.adaptation.assistant_rules import RESOURCES, RuledFlow, RuledOp
from hocket.adaptation.assistants import order_of, predicted_step_us, transfer_delay
from hocket.adaptation.units import units_of
from hocket.distributed.stages.cpu_use import CpuUse
from hocket.distributed.stages.crossings import rank_name
from hocket.distributed.stages.migration import Migration, MovedOps, compare, divided_anew, migrated
from hocket.distributed.stages.stage_job import StageJob
from hocket.errors import InputError, PeerError, PlanError
from hocket.ir import Costs, Graph, Machine, Timeline

__all__ = ["NUM_SHARES", "SHARES", "Rebalancer", "rebalanced", "rules_read", "rules_told", "written_rules"]

SHARES = "shares"
# The use of three resources, how long ops took over what was planned, and how long a step took.
NUM_SHARES = len(RESOURCES) + 2
# The last steps before each look: one of them may have been disturbed.
MEASURED_STEPS = 5
# By so much a rank has to be slower or faster than when it was decided to leave all ops; twice as much each time.
SAME = 0.1


class Rebalancer:
    """Decides on one rank, as on all others, which ops move.

    Args:
        rules: those of rank 0.
        rank: of this process.
        every_steps: how many steps lie between two looks.

    Attributes:
        shares: what all ranks measured, at the last look.
    """

    def __init__(self, rules: AssistantRules, rank: int, every_steps: int) -> None:
        self.rules = rules
        self.shares: tuple[DeviceShare, ...] = ()
        self._rank, self._every_steps = rank, every_steps
        self._timelines: list[Timeline] = []
        self._slowdown = 1.0
        self._moved_at = 0
        self._left: tuple[DeviceShare, ...] = ()
        self._times_left = 0
        self._cpus = CpuUse()

    def note(self, steps: int, timeline: Callable[[], Timeline]) -> None:
        """The step has run that makes it so many; its timeline is asked for where it counts.

        Up to where the first look would be, all is warming up.
        """
        if steps == self._every_steps:
            self._cpus.since_last()
        elif steps > self._every_steps and -steps % self._every_steps < MEASURED_STEPS:
            self._timelines.append(timeline())

    def is_due(self, steps: int) -> bool:
        """Whether all ranks look before the next step."""
        return bool(self._timelines) and steps % self._every_steps == 0

    def moves(self, job: StageJob, steps: int) -> tuple[OpMove, ...]:
        """What moves now; none in most steps. Every rank asks at the same time.

        Raises:
            PeerError: a rank is gone or silent.
        """
        mine = self._measured(steps)
        numbers = [*map(mine.of, RESOURCES), mine.slowdown, mine.step_us]
        told = job.exchanged(SHARES, torch.tensor(numbers, dtype=torch.float64))
        self.shares = tuple(
            DeviceShare(compute, memory, network, slowdown, mine.steps, step_us)
            for compute, memory, network, slowdown, step_us in (values.tolist() for values in told.values())
        )
        if mine.steps < self.rules.settle_steps or (self._left and self._is_like(self._left)):
            return ()
        found = decide(self.shares, self.rules, self._assignment(job.rank_of))
        if not found:
            self.leave()
        return found

    def leave(self) -> None:
        """By the numbers of the last look all ops stay where they are."""
        self._times_left = self._times_left + 1 if self._left and self._has_same_givers(self._left) else 0
        self._left = self.shares

    def begin(self, steps: int) -> None:
        """Measure anew: ops have moved, or the first step is about to run."""
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
        """The numbers by which it was decided, in words."""
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
        """What this rank's last steps say, by the one of them in which its ops took the median time."""
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
        # A rank that has no ops is as slow as it was when it had some.
        return dataclasses.replace(share, slowdown=self._slowdown, step_us=step_us)

    def _is_like(self, before: Sequence[DeviceShare]) -> bool:
        """Whether the same devices give, and none is much slower or faster than it was."""
        much = SAME * 2.0**self._times_left
        return self._has_same_givers(before) and all(
            abs(now.slowdown - then.slowdown) <= much * then.slowdown
            for now, then in zip(self.shares, before, strict=True)
        )

    def _has_same_givers(self, before: Sequence[DeviceShare]) -> bool:
        theta = self.rules.theta
        return all(
            (now.of(resource) > theta) == (then.of(resource) > theta)
            for now, then in zip(self.shares, before, strict=True)
            for resource in RESOURCES
        )

    def _assignment(self, rank_of: Mapping[str, int]) -> list[int]:
        return [rank_of[op.name] for op in self.rules.ops]


def rebalanced(
    look: Rebalancer, job: StageJob, steps: int, stop: Callable[[], None]
) -> tuple[StageJob, Migration | None]:
    """Look, decide, and have ops move; every rank does so at the same time.

    Args:
        look: decides.
        job: as it is.
        steps: how many have run.
        stop: called before anything moves; returns when nothing is on its way.

    Returns:
        The job as it goes on, the same where nothing has moved; and what moved or was refused, if anything was to.

    Raises:
        PeerError: a rank is gone or silent, or decides otherwise; names it.
    """
    if not (moves := look.moves(job, steps)):
        return job, None
    rank_of, order = look.placed(moves, job.rank_of)
    planned = Migration(steps, look.as_units(moves), 0, 0.0, look.why(job.rank_of, rank_of))
    try:
        after = divided_anew(job, rank_of, order)
    except (InputError, PlanError) as error:
        compare(job, 0)  # all ranks refuse
        look.leave()
        return job, dataclasses.replace(planned, refused=str(error))
    stop()
    after, size_bytes = migrated(job, after)
    return after, dataclasses.replace(planned, size_bytes=size_bytes)


def written_rules(
    graph: Graph, costs: Costs, machine: Machine, together: Sequence[Sequence[str]], migration_us: float
) -> AssistantRules:
    """What rank 0 writes: a device for each rank, and ops in units that may leave one.

    Args:
        graph: the whole step.
        costs: what it was profiled at.
        machine: of `machine_of_ranks`.
        together: ops that have to share a rank, some at a time.
        migration_us: how long it takes to divide the step anew.
    """
    width = machine.devices[0].cores
    takes_us = {op.name: costs.duration_us(op.name, width=width) for op in graph.ops}
    units = units_of(graph, takes_us, together)
    return assistant_rules(graph, costs, machine, units=units, migration_us=migration_us)


def rules_told(rules: AssistantRules) -> dict[str, Any]:
    """Rules as what JSON can say."""
    return dataclasses.asdict(rules)


def rules_read(told: Mapping[str, Any], graph: Graph, num_ranks: int) -> AssistantRules:
    """The rules that another rank told.

    Raises:
        PeerError: they are none for this step and so many ranks.

    Example:
        >>> import json
        >>> from hocket.ir import Op
        >>> rules = AssistantRules(("rank0",), (RuledOp("a", "compute", (5.0,)),))
        >>> rules_read(json.loads(json.dumps(rules_told(rules))), Graph((Op("a"),)), 1) == rules
        True
    """
    try:
        numbers = dict(told)
        devices, ops, flows = (numbers.pop(key) for key in ("devices", "ops", "flows"))
        made = [RuledOp(name, resource, tuple(takes_us), *others) for name, resource, takes_us, *others in ops]
        rules = AssistantRules(tuple(devices), tuple(made), tuple(RuledFlow(*flow) for flow in flows), **numbers)
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise PeerError(f"rank 0 tells rules that are none: {error}") from error
    if {op.name for op in rules.ops} != set(graph.by_name) or len(rules.devices) != num_ranks:
        raise PeerError("rank 0 tells rules of another step")
    return rules
