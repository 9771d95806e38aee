"""`StagePlanner`: at rank 0, profiles a step, divides it between ranks, and makes the rules by which ops may move.

The memory of a rank depends on the lifetime of values, and on copies of exchanged values, which stay until they are
delivered and read. So a partition is judged by the peak of each rank's part over all runs that its plan allows
(`peak_bytes`). Ops do not wait for deliveries, and received values have memory from the beginning of the step. If that
is too much, ops wait, and receives begin later, until enough memory is free (`held_back`). If no waits are enough,
other partitions are searched (`hocket.planning.partition.within_memory`).

Memory outside of the step (code, the Python objects of the whole graph) is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from hocket.adaptation import AssistantRules
from hocket.distributed.plans import LATENCY_US, profiled
from hocket.distributed.stages.crossings import Borders, joined_order, joined_plan, plan_of_rank, rank_name, ranks_of
from hocket.distributed.stages.rebalancing import made_rules, rules_from
from hocket.distributed.stages.stage_job import StageJob
from hocket.errors import InputError
from hocket.execution.base import arrivals_apart
from hocket.ir import Costs, Device, Graph, Link, Machine, Plan
from hocket.planning.critical_path import held_back, peak_bytes, serial_peak_bytes
from hocket.planning.partition import Partition, PartPeaks, partitioned_within, problem_of
from hocket.profiling.analytic import estimate, measure_rates
from hocket.tracing.captured import Captured

# Default limit, as a multiple of an equal share of the memory of one process. It is dropped if it cannot be kept.
DEFAULT_SHARE = 1.3


def limits_of(given: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...] | None:
    """The memory limit of each rank in bytes, above 0, or None if there is none. One number is for every rank."""
    if given is None:
        return None
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * num_ranks
    if len(limits) != num_ranks or not all(isinstance(each, (int, float)) and each > 0 for each in limits):
        raise InputError(
            f"distribute: expected memory_bytes to be a number above 0, or one for each of {num_ranks} ranks, "
            f"got {given!r}"
        )
    return tuple(map(float, limits))


def held_within(
    parts: Sequence[Captured], plan: Plan, order: Sequence[str], limits: Sequence[float]
) -> tuple[Plan, tuple[float, ...]]:
    """Add waits to the joined plan that keep ranks within their limits, and return it with the peaks of all ranks.

    If no waits keep a rank within its limit, it gets those with the smallest peak that this order allows.
    """
    peaks = []
    after = dict(plan.after)
    for rank, (part, limit) in enumerate(zip(parts, limits, strict=True)):
        kept = [name for name in order if name in part.graph.by_name]
        apart = arrivals_apart(plan_of_rank(plan, rank))
        peak = peak_bytes(part.graph, apart, kept)
        if peak > limit:
            least = serial_peak_bytes(part.graph, kept)
            found = held_back(part.graph, apart, kept, max(limit, least))
            assert found is not None  # the order itself keeps that
            held, peak = found
            after |= held.after
        peaks.append(peak)
    return replace(plan, after=after), tuple(peaks)


def check_fits(graph: Graph, limits: Sequence[float]) -> None:
    """Raise an `InputError` for an op that needs more memory than the largest limit."""
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers}
    for op in graph.ops:
        needed = sum(size.get(name, 0.0) for name in {*op.reads, *op.writes})
        if needed > max(limits):
            raise InputError(
                f"distribute: op {op.name!r} needs {needed:,.0f} bytes to run, and no rank may hold more than "
                f"{max(limits):,.0f}"
            )


def check_peaks(peaks: Sequence[float], limits: Sequence[float]) -> None:
    """Raise an `InputError` if a rank exceeds its limit. It is named, with both numbers of bytes."""
    rank = int(np.argmax(np.asarray(peaks) / np.asarray(limits)))
    if peaks[rank] > limits[rank]:
        raise InputError(
            f"distribute: rank {rank} would hold {peaks[rank]:,.0f} bytes at its peak, and may hold "
            f"{limits[rank]:,.0f}; no division that was looked at needs less"
        )


@dataclass
class StagePlanner:
    """Makes the plan of all ranks, at rank 0."""

    # a rank for each op, or a plan with a lane for each rank. None: ops are profiled and partitioned.
    given: Plan | Mapping[str, int] | None
    search: Mapping[str, Any]  # arguments of the partitioner
    profiles: bool  # True: ops are profiled even if a partition is given, since moving ops needs their costs
    partition: Partition | None = None  # the partition that was found, unless one was given
    costs: Costs | None = None  # input of the partitioner, as is the machine
    machine: Machine | None = None
    limits: tuple[float, ...] | None = None  # memory limit of each rank in bytes, or None
    estimates: bool = False  # True: costs are estimated, since no rank has all values
    peaks_bytes: tuple[float, ...] = ()  # predicted peak memory of each rank

    def plan(self, captured: Captured, borders: Borders, num_ranks: int, bytes_per_s: float) -> Plan:
        """The plan of all ranks, or an `InputError` if the given division or a memory limit rules it out."""
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
            plan, self.peaks_bytes = joined.held((math.inf,) * num_ranks)
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
        """Return the rules by which ops of a job may move, which rank 0 makes. Every rank calls it."""
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

    def held(self, limits: Sequence[float]) -> tuple[Plan, tuple[float, ...]]:
        """The plan with waits that keep memory limits, and the peaks. See `held_within`."""
        return held_within(self._parts, self.plan, self._order, limits)


def machine_of_ranks(num_ranks: int, threads: int, bytes_per_s: float) -> Machine:
    """A machine with an equal device for each rank, and a link each way between any two."""
    names = [rank_name(rank) for rank in range(num_ranks)]
    links = [Link(one, other, bytes_per_s, LATENCY_US) for one in names for other in names if one != other]
    return Machine(tuple(Device(name, cores=threads) for name in names), tuple(links))
