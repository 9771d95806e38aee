"""What rank 0 does for all: profiles the step, divides it between ranks, writes the rules by which ops may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.adaptation import AssistantRules
from hocket.distributed.plans import LATENCY_US, PROFILE_RUNS
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.joined import joined_order, joined_plan, ranks_of
from hocket.distributed.stages.memory_limits import (
    DEFAULT_SHARE,
    check_fits,
    check_peaks,
    held_within,
    peaks_of,
)
from hocket.distributed.stages.rebalancing import rules_read, rules_told, written_rules
from hocket.distributed.stages.stage_job import StageJob
from hocket.ir import Costs, Device, Graph, Link, Machine, Plan
from hocket.planning.critical_path import serial_peak_bytes
from hocket.planning.partition import Partition, PartPeaks, partitioned_within, problem_of
from hocket.profiling import profile
from hocket.profiling.analytic import estimate, measure_rates
from hocket.tracing.captured import Captured

__all__ = ["StagePlanner", "machine_of_ranks"]


@dataclass
class StagePlanner:
    """Plans on rank 0; on other ranks it takes what that tells.

    Attributes:
        given: a rank for each op, or a plan with a lane for each rank; None: ops are profiled and partitioned.
        search: how, as arguments of the partitioner.
        estimates: whether costs are estimated, not profiled: where no rank has all values.
        profiles: whether ops are profiled whatever is given: who may move them has to know their costs.
        partition: what was found, where it was searched for.
        costs, machine: what it was made from.
        limits: bytes that each rank may hold; None: none was set.
        peaks_bytes: how much each rank holds at the most, as predicted.
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
        """The plan of all ranks.

        Args:
            captured: the whole step.
            borders: of it.
            num_ranks: how many there are.
            bytes_per_s: between any two of them.

        Raises:
            InputError: the division that was given cannot be run, or a rank would hold more than it may.
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
                with torch.random.fork_rng(devices=[]):  # it draws what it computes with
                    machine = measure_rates(machine)
                self.costs = estimate(captured.graph, machine)
            else:
                self.costs = profile(captured, widths=[threads], runs=PROFILE_RUNS, machine=machine)
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
        elif max(self.peaks_bytes) > fair_bytes:  # waits are only paid for where they are enough
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
        """The rules by which ops of a job may move, those that rank 0 writes; every rank asks for them.

        Raises:
            PeerError: rank 0 has failed, or tells something else.
        """
        peers, graph = job.peers, job.captured.graph
        if peers.rank == 0:
            assert self.costs is not None
            assert self.machine is not None
            together = [ops for ops, _ in Borders(job.captured).together]
            peers.tell("rules", rules_told(written_rules(graph, self.costs, self.machine, together, job.dividing_us)))
        return rules_read(peers.told("rules", by=0), graph, peers.num_workers)


def _ranks_by(found: Partition) -> dict[str, int]:
    return dict(zip(found.problem.names, found.part, strict=True))


class _Joined:
    """The plan of all ranks, and what each holds at the most."""

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
        """With the waits that keep limits; see `held_within`."""
        return held_within(self._parts, self.plan, self._order, limits)


def machine_of_ranks(num_ranks: int, threads: int, bytes_per_s: float) -> Machine:
    """Equal devices, as many as ranks, and a link each way between any two.

    Example:
        >>> [link.channel for link in machine_of_ranks(2, 1, 1e9).links]
        ['rank0->rank1', 'rank1->rank0']
    """
    names = [rank_name(rank) for rank in range(num_ranks)]
    links = [Link(one, other, bytes_per_s, LATENCY_US) for one in names for other in names if one != other]
    return Machine(tuple(Device(name, cores=threads) for name in names), tuple(links))
