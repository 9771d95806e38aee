"""`Rebalancer`: measures a rank's steps, and decides by the measurements of all ranks which ops move.

Rank 0 makes the rules (`hocket.adaptation`): profiled ops, flows, and units that move together. After every few steps
all ranks exchange the use of their cores by all processes, and the ratio of measured to planned op times. Each makes
the same decision. After a decision to leave all ops, the next search waits until some measurement differs, by more
each time, since a search costs as much as a step of a large model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hocket.adaptation import AssistantRules, DeviceShare, OpMove, assistant_rules, decide, shares_of
from hocket.adaptation.assistant_rules import RESOURCES, RuledFlow, RuledOp
from hocket.adaptation.assistants import order_of, predicted_step_us, transfer_delay
from hocket.adaptation.cpu_use import CpuUse
from hocket.adaptation.units import units_of
from hocket.distributed.stages.crossings import rank_name
from hocket.distributed.stages.migration import Migration, MovedOps, compare_plans, divided_again, migrated
from hocket.distributed.stages.stage_job import StageJob
from hocket.errors import InputError, PeerError, PlanError
from hocket.ir import Costs, Graph, Machine, Timeline

SHARES = "shares"
# The use of three resources, measured over planned op time, and the step time.
NUM_SHARES = len(RESOURCES) + 2
# Number of steps measured before each decision: one of them may have been disturbed.
MEASURED_STEPS = 5
# Relative change of a rank's speed after which ops may move again, doubled after each decision to leave all ops.
SAME = 0.1


class Rebalancer:
    """Decides which ops move. All ranks make the same decision.

    Attributes:
        shares: measurements of all ranks at the last decision.
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
        """Decide which ops move now, mostly none. Every rank calls it at the same time.

        Raises:
            PeerError: a rank is gone or silent.
        """
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
    """Measure, decide, and move ops. Every rank calls it at the same time.

    Args:
        rebalancer: decides.
        job: the present job.
        steps: number of steps that have run.
        stop: called before anything moves. Waits until no transfer is under way.

    Returns:
        The new job, or the same one if no op has moved, and the migration or its refusal, if one was decided.

    Raises:
        PeerError: a rank is gone or silent, or decides otherwise, and is named.
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
    """Make the rules at rank 0: a device for each rank, and ops in units that may move.

    Args:
        graph: the whole step.
        costs: its profiled costs.
        machine: result of `machine_of_ranks`.
        together: sets of ops that share a rank.
        migration_us: time it takes to divide the step again.
    """
    width = machine.devices[0].cores
    takes_us = {op.name: costs.duration_us(op.name, width=width) for op in graph.ops}
    units = units_of(graph, takes_us, together)
    return assistant_rules(graph, costs, machine, units=units, migration_us=migration_us)


def rules_from(document: Mapping[str, Any], graph: Graph, num_ranks: int) -> AssistantRules:
    """Read the rules that rank 0 announces: the fields of `AssistantRules`.

    Raises:
        PeerError: they are malformed, or rules of another step or another number of ranks.

    Example:
        >>> import json
        >>> from hocket.ir import Op
        >>> rules = AssistantRules(("rank0",), (RuledOp("a", "compute", (5.0,)),))
        >>> rules_from(json.loads(json.dumps(dataclasses.asdict(rules))), Graph((Op("a"),)), 1) == rules
        True
    """
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
