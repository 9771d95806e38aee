"""What rank 0 does for all: profiles the step, divides it between ranks, writes the rules by which ops may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hocket.adaptation import AssistantRules
from hocket.distributed.plans import LATENCY_US, PROFILE_RUNS
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.joined import joined_plan, ranks_of
from hocket.distributed.stages.rebalancing import rules_read, rules_told, written_rules
from hocket.distributed.stages.stage_job import StageJob
from hocket.ir import Costs, Device, Link, Machine, Plan
from hocket.planning.partition import Partition, partitioned, problem_of
from hocket.profiling import profile
from hocket.tracing.captured import Captured

__all__ = ["StagePlanner", "machine_of_ranks"]


@dataclass
class StagePlanner:
    """Plans on rank 0; on other ranks it takes what that tells.

    Attributes:
        given: a rank for each op, or a plan with a lane for each rank; None: ops are profiled and partitioned.
        search: how, as arguments of the partitioner.
        profiles: whether ops are profiled whatever is given: who may move them has to know their costs.
        partition: what was found, where it was searched for.
        costs, machine: what it was made from.
    """

    given: Plan | Mapping[str, int] | None
    search: Mapping[str, Any]
    profiles: bool
    partition: Partition | None = None
    costs: Costs | None = None
    machine: Machine | None = None

    def plan(self, captured: Captured, borders: Borders, num_ranks: int, bytes_per_s: float) -> Plan:
        """The plan of all ranks.

        Args:
            captured: the whole step.
            borders: of it.
            num_ranks: how many there are.
            bytes_per_s: between any two of them.

        Raises:
            InputError: the division that was given cannot be run.
        """
        threads = torch.get_num_threads()
        order: tuple[str, ...] = captured.graph.order
        if self.given is None or self.profiles:
            self.machine = machine_of_ranks(num_ranks, threads, bytes_per_s)
            self.costs = profile(captured, widths=[threads], runs=PROFILE_RUNS, machine=Machine.of(cores=threads))
        if self.given is None:
            assert self.costs is not None
            assert self.machine is not None
            together = [ops for ops, _ in borders.together]
            problem = problem_of(captured.graph, self.costs, self.machine, together=together)
            self.partition = partitioned(problem, **self.search)
            order = self.partition.names_in_order
            rank_of = dict(zip(problem.names, self.partition.part, strict=True))
        elif isinstance(self.given, Plan):
            rank_of = ranks_of(self.given)
        else:
            rank_of = dict(self.given)
        borders.check(rank_of, num_ranks)
        return joined_plan(captured.graph, order, rank_of, borders.crossings(rank_of, num_ranks), threads)

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


def machine_of_ranks(num_ranks: int, threads: int, bytes_per_s: float) -> Machine:
    """Equal devices, as many as ranks, and a link each way between any two.

    Example:
        >>> [link.channel for link in machine_of_ranks(2, 1, 1e9).links]
        ['rank0->rank1', 'rank1->rank0']
    """
    names = [rank_name(rank) for rank in range(num_ranks)]
    links = [Link(one, other, bytes_per_s, LATENCY_US) for one in names for other in names if one != other]
    return Machine(tuple(Device(name, cores=threads) for name in names), tuple(links))
