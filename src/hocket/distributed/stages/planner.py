"""`StagePlanner`: at rank 0, profiles a step, divides it between ranks, and makes the rules by which ops may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hocket.adaptation import AssistantRules
from hocket.distributed.plans import LATENCY_US, profiled
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.joined import joined_order, joined_plan, ranks_of
from hocket.distributed.stages.memory_limits import (
    DEFAULT_SHARE,
    check_fits,
    check_peaks,
    held_within,
    peaks_of,
)
from hocket.distributed.stages.rebalancing import made_rules, rules_from
from hocket.distributed.stages.stage_job import StageJob
from hocket.ir import Costs, Device, Graph, Link, Machine, Plan
from hocket.planning.critical_path import serial_peak_bytes
from hocket.planning.partition import Partition, PartPeaks, partitioned_within, problem_of
from hocket.profiling.analytic import estimate, measure_rates
from hocket.tracing.captured import Captured


@dataclass
class StagePlanner:
    """Makes the plan of all ranks, at rank 0.

    Attributes:
        given: a rank for each op, or a plan with a lane for each rank. None: ops are profiled and partitioned.
        search: arguments of the partitioner.
        profiles: True: ops are profiled even if a partition is given, since moving ops needs their costs.
        partition: the partition that was found, unless one was given.
        costs, machine: input of the partitioner.
        limits: memory limit of each rank in bytes, or None.
        estimates: True: costs are estimated, since no rank has all values.
        peaks_bytes: predicted peak memory of each rank.
    """

    given: Plan | Mapping[str, int] | None
    search: Mapping[str, Any]
    profiles: bool
    partition: Partition | None = None
    costs: Costs | None = None
    machine: Machine | None = None
    limits: tuple[float, ...] | None = None
    estimates: bool = False
    peaks_bytes: tuple[float, ...] = ()

    def plan(self, captured: Captured, borders: Borders, num_ranks: int, bytes_per_s: float) -> Plan:
        """Make the plan of all ranks.

        Args:
            captured: the whole step.
            borders: its borders.
            num_ranks: number of ranks.
            bytes_per_s: rate of the link between any two ranks.

        Raises:
            InputError: the given division cannot run, or a rank would exceed its memory limit.
        """
        if self.limits is not None:
            check_fits(captured.graph, self.limits)
        fair_bytes = DEFAULT_SHARE * serial_peak_bytes(captured.graph) / num_ranks
        wanted = (fair_bytes,) * num_ranks if self.limits is None else self.limits
        threads = torch.get_num_threads()
        order: tuple[str, ...] = captured.graph.order
        if self.given is None or self.profiles:
            self.machine = machine_of_ranks(num_ranks, threads, bytes_per_s)
            machine = Machine.of(cores=threads)
            if self.estimates:
                with torch.random.fork_rng(devices=[]):  # it draws random operands
                    machine = measure_rates(machine)
                self.costs = estimate(captured.graph, machine)
            else:
                self.costs = profiled(captured, [threads])
        if self.given is None:
            self.partition = self._searched(captured.graph, borders, wanted)
            order = self.partition.names_in_order
            rank_of = _ranks_by(self.partition)
        elif isinstance(self.given, Plan):
            rank_of = ranks_of(self.given)
        else:
            rank_of = dict(self.given)
        borders.check(rank_of, num_ranks)
        joined = _Joined(borders, order, rank_of, num_ranks, threads)
        plan, self.peaks_bytes = joined.held(wanted)
        if self.limits is not None:
            check_peaks(self.peaks_bytes, self.limits)
        elif max(self.peaks_bytes) > fair_bytes:  # waits that do not suffice would only cost time
            plan, self.peaks_bytes = joined.plan, joined.peaks
        return plan

    def _searched(self, graph: Graph, borders: Borders, wanted: Sequence[float]) -> Partition:
        assert self.costs is not None
        assert self.machine is not None
        together = [ops for ops, _ in borders.together]
        problem = problem_of(graph, self.costs, self.machine, together=together)

        def peaks(found: Partition) -> tuple[float, ...]:
            return _Joined(borders, found.names_in_order, _ranks_by(found), len(wanted), 1).held(wanted)[1]

        held = PartPeaks(graph, graph.order, len(wanted))
        return partitioned_within(problem, self.search, wanted, held, peaks, is_promise=self.limits is not None)

    def rules(self, job: StageJob) -> AssistantRules:
        """Return the rules by which ops of a job may move, which rank 0 makes. Every rank calls it.

        Raises:
            PeerError: rank 0 has failed, or announces malformed rules.
        """
        graph = job.captured.graph
        if job.rank == 0:
            assert self.costs is not None
            assert self.machine is not None
            together = [ops for ops, _ in Borders(job.captured).together]
            rules = made_rules(graph, self.costs, self.machine, together, job.dividing_us)
            job.membership.announce("rules", asdict(rules))
        return rules_from(job.membership.announced("rules", by=0), graph, job.num_ranks)


def _ranks_by(found: Partition) -> dict[str, int]:
    return dict(zip(found.problem.names, found.part, strict=True))


class _Joined:
    """The plan of all ranks, and the peak memory of each."""

    def __init__(
        self, borders: Borders, order: Sequence[str], rank_of: Mapping[str, int], num_ranks: int, threads: int
    ) -> None:
        graph = borders.captured.graph
        crossings = borders.crossings(rank_of, num_ranks)
        self.plan = joined_plan(graph, order, rank_of, crossings, threads)
        self._parts = [borders.part(rank_of, crossings, rank) for rank in range(num_ranks)]
        self._order = joined_order(graph, order, crossings)

    @property
    def peaks(self) -> tuple[float, ...]:
        return peaks_of(self._parts, self.plan, self._order)

    def held(self, limits: Sequence[float]) -> tuple[Plan, tuple[float, ...]]:
        """The plan with waits that keep memory limits, and the peaks. See `held_within`."""
        return held_within(self._parts, self.plan, self._order, limits)


def machine_of_ranks(num_ranks: int, threads: int, bytes_per_s: float) -> Machine:
    """A machine with an equal device for each rank, and a link each way between any two.

    Example:
        >>> [link.channel for link in machine_of_ranks(2, 1, 1e9).links]
        ['rank0->rank1', 'rank1->rank0']
    """
    names = [rank_name(rank) for rank in range(num_ranks)]
    links = [Link(one, other, bytes_per_s, LATENCY_US) for one in names for other in names if one != other]
    return Machine(tuple(Device(name, cores=threads) for name in names), tuple(links))
