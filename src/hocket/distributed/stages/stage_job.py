"""`StageJob`: a rank that knows its part of one captured step, and is connected with all others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hocket.checking import check
from hocket.distributed.parcels import Parcel, packed
from hocket.distributed.setup import ORDERS, rates_of, take_rates
from hocket.distributed.stages.crossings import Borders, Crossing
from hocket.distributed.stages.joined import checked_parts, plan_of_rank
from hocket.distributed.stages.part_memory import PartMemory
from hocket.distributed.stages.peers import Peers
from hocket.distributed.state import ShardState, make_state
from hocket.distributed.wire import Wire
from hocket.errors import PeerError
from hocket.ir import Plan
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry

__all__ = ["RANDOM", "StageJob", "divided", "places_of", "relieved", "step_parcels"]

RANDOM = "random state"


@dataclass(frozen=True)
class StageJob:
    """A rank that knows its part of the step, and is connected with all others.

    Attributes:
        peers: its place in the job.
        captured: the whole step.
        wires: to each other rank, by its number.
        plan: of all ranks, made by rank 0.
        rank_of: the rank of each op, as the plan has it.
        crossings: what crosses between ranks.
        part: what this rank runs.
        used: for each rank that this one knows of (rank 0: of all) the places that its part reads or writes, by name.
        memory: which parameters, buffers and state have their memory here.
        since: how many times ops have moved.
        dividing_us: how long this division took to make and check.
    """

    peers: Peers
    captured: Captured
    wires: Mapping[int, Wire]
    plan: Plan
    rank_of: Mapping[str, int]
    crossings: tuple[Crossing, ...]
    part: Captured
    used: Mapping[int, frozenset[str]]
    memory: PartMemory
    since: int = 0
    dividing_us: float = 0.0

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The places of all that outlives the step, by name."""
        return places_of(self.captured)

    @cached_property
    def home_of(self) -> dict[str, int]:
        """For each parameter, buffer and state the rank that keeps it; rank 0, if no op touches it."""
        found = Borders(self.captured).home_of(self.rank_of)
        return {name: found.get(name, 0) for name in self.entries}

    @cached_property
    def random_home(self) -> int | None:
        """The rank that draws random numbers, if the step does."""
        drawing = [op.name for op in self.captured.graph.ops if "random generator" in op.writes]
        return self.rank_of[drawing[0]] if drawing else None

    @cached_property
    def plan_digest(self) -> int:
        """A number that other plans do not have."""
        return int.from_bytes(hashlib.sha256(str(self.plan).encode()).digest()[:7], "big")

    def homed_at(self, rank: int) -> ShardState:
        """What a rank is the home of, at this rank's own places; its state is made of zeros where it is not there."""
        names = [name for name, home in self.home_of.items() if home == rank]
        make_state(self.captured, names)
        label = f"state~{self.since}/" if self.since else "state"
        return ShardState(rank, tuple(self.entries[name] for name in names), label)

    def used_at(self, rank: int) -> ShardState:
        """What the part of a rank reads or writes; as `homed_at`."""
        make_state(self.captured, self.used[rank])
        return ShardState(rank, tuple(entry for name, entry in self.entries.items() if name in self.used[rank]))

    def kept_at(self, rank: int) -> frozenset[str]:
        """What a rank keeps the memory of: what its part uses, and what it is the home of."""
        return self.used[rank].union(name for name, home in self.home_of.items() if home == rank)

    @property
    def kept(self) -> frozenset[str]:
        """What this rank keeps the memory of."""
        return self.kept_at(self.peers.rank)

    def agree(self, command: float) -> None:
        """All ranks do the same now, with the rates of rank 0.

        Raises:
            PeerError: a rank is gone, silent, or does something else.
        """
        entries = rates_of(self.captured)
        values = torch.tensor([command, *(float(entry.get()) for entry in entries)], dtype=torch.float64)
        if self.peers.rank == 0:
            for wire in self.wires.values():
                wire.post(ORDERS, values)
            return
        told = torch.empty_like(values)
        self.wires[0].get(ORDERS, told)
        of_rank_0, *rates = told.tolist()
        if of_rank_0 != command:
            raise PeerError(
                f"{self.peers.name(self.peers.rank)} does something else than rank 0: all ranks do the same"
            )
        take_rates(entries, rates)

    def exchanged(self, name: str, mine: torch.Tensor) -> dict[int, torch.Tensor]:
        """What each rank says under a name, this one, too, in the order of the ranks; raises as `agree`."""
        for wire in self.wires.values():
            wire.post(name, mine)
        found = {rank: torch.empty_like(mine) for rank in self.wires}
        for rank, wire in self.wires.items():
            wire.get(name, found[rank])
        return dict(sorted((found | {self.peers.rank: mine}).items()))

    def share_random_state(self, by: int) -> None:
        """All ranks go on with the random numbers of one of them; raises as `agree`."""
        if by == self.peers.rank:
            for wire in self.wires.values():
                wire.post(RANDOM, torch.get_rng_state())
        else:
            state = torch.get_rng_state()
            self.wires[by].get(RANDOM, state)
            torch.set_rng_state(state)

    def first_values(self) -> None:
        """Send what the other ranks read of this one's memory in their first step: what it holds now."""
        for each in self.crossings:
            if each.lasts and each.home == self.peers.rank:
                value = self.entries[each.buffer].get().detach().clone()
                self.wires[each.to].send(each.recv, value, 1, lambda error: None)

    def close(self, error: BaseException | None = None) -> None:
        """Take leave of all ranks; with an error, they fail, and every rank can read why; raises as `Peers.leave`."""
        self.peers.leave(self.wires, error)

    def failed(self, error: BaseException) -> PeerError:
        """What to raise for an error of a step: it names the rank that failed first."""
        return self.peers.failed(self.wires, error)


def divided(
    captured: Captured,
    borders: Borders,
    peers: Peers,
    wires: Mapping[int, Wire],
    plan: Plan,
    memory: PartMemory,
    *,
    all_parts: bool,
    since: int = 0,
) -> StageJob:
    """The part of this rank, by a plan that all ranks have.

    Args:
        captured: the whole step.
        borders: of it.
        peers: this process's place.
        wires: to each other rank.
        plan: the joined one.
        memory: of the places of model and optimizer.
        all_parts: look at those of all ranks together.
        since: how many times ops have moved.

    Raises:
        InputError: a division that could not compute as the whole step does.
        PlanError: the plan is not legal, or two ops that touch the same memory have no order.
    """
    began = time.perf_counter()
    rank_of = {
        op: int(lane.name.removeprefix("rank")) for lane in plan.lanes if lane.kind == "cores" for op in lane.ops
    }
    borders.check(rank_of, peers.num_workers)
    crossings = borders.crossings(rank_of, peers.num_workers, since)
    if all_parts:
        parts = dict(enumerate(checked_parts(borders, rank_of, crossings, plan, peers.num_workers)))
    else:
        parts = {peers.rank: borders.part(rank_of, crossings, peers.rank)}
    check(parts[peers.rank].graph, plan_of_rank(plan, peers.rank))
    places = places_of(captured)
    used = {
        rank: frozenset(source.name for _, source in part.inputs if source.name in places)
        for rank, part in parts.items()
    }
    took_us = (time.perf_counter() - began) * 1e6
    return StageJob(peers, captured, wires, plan, rank_of, crossings, parts[peers.rank], used, memory, since, took_us)


def relieved(job: StageJob) -> StageJob:
    """Without examples of state, and with gradients only where their parameters are."""
    gradients = {g: node if g.parameter.name in job.kept else None for g, node in job.part.trace.gradients.items()}
    part = replace(job.part, stand_ins={}, trace=replace(job.part.trace, gradients=gradients))
    return replace(job, captured=replace(job.captured, stand_ins={}), part=part)


def places_of(captured: Captured) -> dict[str, Entry]:
    """The places of all that outlives the step, by name."""
    places = captured.trace.places
    return {entry.name: entry for entry in (*places.parameters, *places.tensors)}


def step_parcels(job: StageJob, home: int, to: int) -> list[Parcel]:
    """What goes from one rank to another in a step.

    Values of one step go alone: of two that share a parcel, the first would wait for the second, which may wait for
    what the other rank makes of the first. What is sent for the next step waits for nothing of that kind.
    """
    carried = [each for each in job.crossings if (each.home, each.to) == (home, to)]
    alone = [Parcel((each.recv,), (each.size_bytes,)) for each in carried if not each.lasts]
    return [*alone, *packed((each.recv, each.size_bytes) for each in carried if each.lasts)]
