"""`StageJob`: one rank's part of a captured step, its executor, and its connections to all other ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hocket.checking import check
from hocket.distributed.channels import PullChannel
from hocket.distributed.job import JoinedJob
from hocket.distributed.packets import Packet, pack
from hocket.distributed.stages.crossings import Borders, Crossing, checked_parts, link_name, plan_of_rank
from hocket.distributed.stages.memory import PartMemory
from hocket.distributed.staging import random_state, set_random_state
from hocket.distributed.state import ShardState, make_state
from hocket.distributed.wire import Wire
from hocket.errors import PeerError
from hocket.execution import executor
from hocket.execution.channels import Channel, Done
from hocket.ir import Plan
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry

RANDOM = "random state"


@dataclass(frozen=True)
class StageJob(JoinedJob):
    """A job of equal ranks, each of which runs a part of the step. The keys of `wires` are ranks."""

    plan: Plan  # plan of all ranks, made by rank 0
    rank_of: Mapping[str, int]  # rank of each op, by the plan
    crossings: tuple[Crossing, ...]  # values that cross between ranks
    part: Captured  # part of this rank
    # for each rank known here (at rank 0: all) the names of the places that its part reads or writes
    used: Mapping[int, frozenset[str]]
    memory: PartMemory  # places that have memory here
    since: int = 0  # number of migrations before
    dividing_us: float = 0.0  # time it took to make and check this division

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def num_ranks(self) -> int:
        return self.membership.num_workers

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Places of everything that outlives the step, by name."""
        return places_of(self.captured)

    @cached_property
    def home_of(self) -> dict[str, int]:
        """The rank that keeps each parameter, buffer and state: rank 0 if no op uses it."""
        found = Borders(self.captured).home_of(self.rank_of)
        return {name: found.get(name, 0) for name in self.entries}

    @cached_property
    def random_home(self) -> int | None:
        """The rank that draws random numbers, if the step does."""
        drawing = [op.name for op in self.captured.graph.ops if "random generator" in op.writes]
        return self.rank_of[drawing[0]] if drawing else None

    @cached_property
    def plan_digest(self) -> int:
        """A hash of the plan."""
        return int.from_bytes(hashlib.sha256(str(self.plan).encode()).digest()[:7], "big")

    def homed_at(self, rank: int) -> ShardState:
        """The state whose home is a rank, as places of this rank. Missing state is created as zeros."""
        names = [name for name, home in self.home_of.items() if home == rank]
        make_state(self.captured, names)
        label = f"state~{self.since}/" if self.since else "state"
        return ShardState(rank, tuple(self.entries[name] for name in names), label)

    def used_at(self, rank: int) -> ShardState:
        """The state that the part of a rank reads or writes, as `homed_at`."""
        make_state(self.captured, self.used[rank])
        return ShardState(rank, tuple(entry for name, entry in self.entries.items() if name in self.used[rank]))

    def kept_at(self, rank: int) -> frozenset[str]:
        """Names of places that have memory at a rank: those that its part uses, and those whose home it is."""
        return self.used[rank].union(name for name, home in self.home_of.items() if home == rank)

    @property
    def kept(self) -> frozenset[str]:
        """Names of places that have memory at this rank."""
        return self.kept_at(self.rank)

    def agree(self, command: int) -> None:
        """Check that all ranks run the same command, and take over the rates of rank 0."""
        if self.rank == 0:
            self.send_command(command)
        elif self.receive_command()[0] != command:
            raise PeerError(f"{self.membership.me} does something else than rank 0: all ranks do the same")

    def exchanged(self, name: str, mine: torch.Tensor) -> dict[int, torch.Tensor]:
        """Exchange a value with all ranks, and return those of all ranks in their order. Raises as `agree`."""
        for wire in self.wires.values():
            wire.post(name, mine)
        found = {rank: torch.empty_like(mine) for rank in self.wires}
        for rank, wire in self.wires.items():
            wire.get(name, found[rank])
        return dict(sorted((found | {self.rank: mine}).items()))

    def share_random_state(self, by: int) -> None:
        """Set the states of the random generators at all ranks to those of one of them. Raises as `agree`."""
        state = random_state(self.devices)
        if by == self.rank:
            for wire in self.wires.values():
                wire.post(RANDOM, state)
        else:
            self.wires[by].get(RANDOM, state)
            set_random_state(self.devices, state)

    def step_packets(self, home: int, to: int) -> list[Packet]:
        """The packets from one rank to another in a step.

        Values of one step are not packed: of two that share a packet, the first would wait for the second, which may
        depend on the other rank's use of the first. Values for the next step have no such dependency.
        """
        carried = [each for each in self.crossings if (each.home, each.to) == (home, to)]
        alone = [Packet((each.recv,), (each.size_bytes,)) for each in carried if not each.lasts]
        return [*alone, *pack((each.recv, each.size_bytes) for each in carried if each.lasts)]


class RunningPart:
    """The executor of a rank's part, with channels to the other ranks. All ranks create theirs at the same time.

    It begins by sending the values that other ranks read of this one's memory in their first step.
    """

    def __init__(self, job: StageJob, kind: str, steps: int) -> None:
        self._arriving: list[PullChannel] = []
        self._since = steps
        channels: dict[str, Channel] = {}
        here = job.rank
        for rank, wire in job.wires.items():
            lasting = [each.recv for each in job.crossings if each.lasts and (each.home, each.to) == (rank, here)]
            self._arriving.append(PullChannel(wire, lasting))
            channels[link_name(rank, here)] = self._arriving[-1]
            channels[link_name(here, rank)] = StageSends(wire, job, rank)
        # runs a step when it is called with a batch
        self.executor = executor(job.part, plan_of_rank(job.plan, here), kind=kind, channels=channels)
        for each in job.crossings:
            if each.lasts and each.home == here:
                value = job.entries[each.buffer].get().detach().clone()
                job.wires[each.to].send(each.recv, value, 1, lambda error: None)

    def synchronize(self, steps: int) -> None:
        """Wait until no transfer is under way after this number of steps. Raises `PeerError` if a rank is gone."""
        for channel in self._arriving:
            channel.wait(steps - self._since + 1)


class StageSends:
    """Channel of values to one other rank. Those that outlive the step are for its next one."""

    runs_ahead = False
    runs_behind = False

    def __init__(self, wire: Wire, job: StageJob, to: int) -> None:
        self._wire = wire
        self._sent = {each.send: each for each in job.crossings if (each.home, each.to) == (job.rank, to)}

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        each = self._sent[op]
        self._wire.send(each.recv, tensor, epoch + 1 if each.lasts else epoch, done)


def divided(
    job: JoinedJob, borders: Borders, plan: Plan, memory: PartMemory, *, all_parts: bool, since: int = 0
) -> StageJob:
    """Make the part of this rank, by a plan that all ranks have. With `all_parts` those of all are checked together."""
    began = time.perf_counter()
    captured, rank, num_ranks = job.captured, job.membership.rank, job.membership.num_workers
    rank_of = {
        op: int(lane.name.removeprefix("rank")) for lane in plan.lanes if lane.kind == "cores" for op in lane.ops
    }
    borders.check(rank_of, num_ranks)
    crossings = borders.crossings(rank_of, num_ranks, since)
    if all_parts:
        parts = dict(enumerate(checked_parts(borders, rank_of, crossings, plan, num_ranks)))
    else:
        parts = {rank: borders.part(rank_of, crossings, rank)}
    check(parts[rank].graph, plan_of_rank(plan, rank))
    places = places_of(captured)
    used = {
        each: frozenset(source.name for _, source in part.inputs if source.name in places)
        for each, part in parts.items()
    }
    took_us = (time.perf_counter() - began) * 1e6
    made = (plan, rank_of, crossings, parts[rank], used, memory, since, took_us)
    return StageJob(job.membership, captured, job.wires, *made)


def trimmed(job: StageJob) -> StageJob:
    """The job without examples of state, and with gradients only of parameters that have memory here."""
    gradients = {g: node if g.parameter.name in job.kept else None for g, node in job.part.trace.gradients.items()}
    part = replace(job.part, stand_ins={}, trace=replace(job.part.trace, gradients=gradients))
    return replace(job, captured=replace(job.captured, stand_ins={}), part=part)


def places_of(captured: Captured) -> dict[str, Entry]:
    """Places of everything that outlives the step, by name."""
    places = captured.trace.places
    return {entry.name: entry for entry in (*places.parameters, *places.tensors)}
