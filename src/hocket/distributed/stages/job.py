"""How a job of equal ranks begins, in which each runs a part of one captured step, and what they tell each other.

    capture | compare with rank 0 | wires | rank 0 divides and plans for all | check | rank 0's state to all

Nothing of a peer is believed before: sizes, names and dtypes are those that this rank captured itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.checking import check
from hocket.distributed.description import described, difference, digest, kind_in_words
from hocket.distributed.parcels import Parcel, packed
from hocket.distributed.parts import check_exchangeable
from hocket.distributed.setup import ORDERS, PROBE, PROBE_BYTES, rates_of, take_rates
from hocket.distributed.stages.crossings import Borders, Crossing
from hocket.distributed.stages.joined import checked_parts, plan_of_rank
from hocket.distributed.stages.on_meta import captured_at, given_memory
from hocket.distributed.stages.part_memory import PartMemory
from hocket.distributed.stages.peers import Peers
from hocket.distributed.state import ShardState, begin_from_zeros, has_state, make_state
from hocket.distributed.wire import Wire
from hocket.errors import PeerError
from hocket.ir import Plan
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry

__all__ = ["StageJob", "begun_job"]

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
        memory: which parameters, buffers and state have their memory here.
    """

    peers: Peers
    captured: Captured
    wires: Mapping[int, Wire]
    plan: Plan
    rank_of: Mapping[str, int]
    crossings: tuple[Crossing, ...]
    part: Captured
    memory: PartMemory

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The places of all that outlives the step, by name."""
        return _entries(self.captured)

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

    def homed_at(self, rank: int) -> ShardState:
        """What a rank is the home of, at this rank's own places; its state is made of zeros where it is not there."""
        names = [name for name, home in self.home_of.items() if home == rank]
        make_state(self.captured, names)
        return ShardState(rank, tuple(self.entries[name] for name in names))

    def used_at(self, rank: int) -> ShardState:
        """What the part of a rank reads or writes; as `homed_at`."""
        part = self.part if rank == self.peers.rank else Borders(self.captured).part(self.rank_of, self.crossings, rank)
        names = dict.fromkeys(source.name for _, source in part.inputs if source.name in self.entries)
        make_state(self.captured, names)
        return ShardState(rank, tuple(self.entries[name] for name in names))

    @cached_property
    def kept(self) -> frozenset[str]:
        """What this rank keeps the memory of: what its part uses, and what it is the home of."""
        here = self.peers.rank
        return frozenset(e.name for e in (*self.used_at(here).tensors, *self.homed_at(here).tensors))

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
        """Take leave of all ranks; with an error, they fail, and every rank can read why."""
        self.peers.leave(self.wires, error)

    def failed(self, error: BaseException) -> PeerError:
        """What to raise for an error of a step: it names the rank that failed first."""
        return self.peers.failed(self.wires, error)


def begun_job(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    peers: Peers,
    planned: Callable[[Captured, Borders, float], Plan],
) -> StageJob:
    """Capture, compare, connect, divide; and all ranks get the state that rank 0 has.

    Args:
        step: the user's own.
        model: what it trains, one or a list.
        optimizer: as well.
        batch: of the first step.
        peers: this process's place.
        planned: makes the joined plan, on rank 0; it is told the whole step, its borders, and bytes per second
            between ranks.

    Raises:
        CaptureError, InputError: the step cannot be captured, or divided; says why.
        PeerError: another rank trains something else, has failed, or does not come.
    """
    wires: dict[int, Wire] = {}
    try:
        captured = captured_at(peers.rank, step, model, optimizer, batch)
        _agree(captured, batch, peers)
        captured = given_memory(captured)
        check_exchangeable(captured, 1)
        wires.update(zip(peers.others, peers.wires(), strict=True))
        borders = Borders(captured)
        rate = _rate(captured, peers, wires)
        if peers.rank == 0:
            peers.tell("plan", str(planned(captured, borders, rate)))
        job = _divided(captured, borders, peers, wires, Plan.parse(peers.told("plan", by=0)))
        _lay_wires(job)
        job = _relieved(job)
    except BaseException as error:
        if isinstance(error, PeerError):
            raise peers.failed(wires, error) from error
        peers.leave(wires, error)
        raise
    return job


def _agree(captured: Captured, batch: Any, peers: Peers) -> None:
    mine = described(captured, peers.num_workers, 0)
    of_graph = {kind: mine.pop(kind) for kind in ("op", "constant")}
    mine |= {"batch": _batch_described(batch)} | of_graph
    if peers.rank == 0:
        peers.tell("description", mine)
    elif (found := difference(mine, peers.told("description", by=0))) is not None:
        raise PeerError(f"{peers.name(peers.rank)} trains something else: {found}")
    peers.meet("agreed")


def _batch_described(batch: Any) -> dict[str, str]:
    return {
        f"leaf {number}": f"{kind_in_words(leaf)} with digest {digest(leaf)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for number, leaf in enumerate(tree_flatten(batch)[0])
    }


def _rate(captured: Captured, peers: Peers, wires: Mapping[int, Wire]) -> float:
    """Bytes per second that rank 0 sends to one rank after the other; infinite at all other ranks."""
    control = [Parcel((ORDERS,), (8 * (1 + len(rates_of(captured))),)), Parcel((PROBE,), (PROBE_BYTES,))]
    random = Parcel((RANDOM,), (torch.get_rng_state().numel(),))
    for rank, wire in wires.items():
        outgoing = control if peers.rank == 0 else []
        wire.add([*outgoing, random], [*(control if rank == 0 else []), random])
    peers.meet("wired")
    memory = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    if peers.rank != 0:
        wires[0].get(PROBE, memory)
        return float("inf")
    began = time.perf_counter()
    for wire in wires.values():
        wire.put(PROBE, memory)
    return PROBE_BYTES * len(wires) / (time.perf_counter() - began)


def _divided(captured: Captured, borders: Borders, peers: Peers, wires: Mapping[int, Wire], plan: Plan) -> StageJob:
    """The part of this rank; rank 0 looks at those of all ranks together.

    Raises:
        InputError: a division that could not compute as the whole step does.
        PlanError: the plan is not legal, or two ops that touch the same memory have no order.
    """
    rank_of = {
        op: int(lane.name.removeprefix("rank")) for lane in plan.lanes if lane.kind == "cores" for op in lane.ops
    }
    borders.check(rank_of, peers.num_workers)
    crossings = borders.crossings(rank_of, peers.num_workers)
    if peers.rank == 0:
        part = checked_parts(borders, rank_of, crossings, plan, peers.num_workers)[0]
    else:
        part = borders.part(rank_of, crossings, peers.rank)
    check(part.graph, plan_of_rank(plan, peers.rank))
    memory = PartMemory(_entries(captured))
    return StageJob(peers, captured, wires, plan, rank_of, crossings, part, memory)


def _lay_wires(job: StageJob) -> None:
    """What wires carry in a step, and once; then every rank takes the state that rank 0 has."""
    here = job.peers.rank
    if here == 0 and not has_state(job.captured):
        begin_from_zeros(job.captured)
    of_others = {rank: job.used_at(rank) for rank in job.peers.others} if here == 0 else {}
    mine = job.used_at(here)
    for rank, wire in job.wires.items():
        outgoing, incoming = _parcels(job, here, rank), _parcels(job, rank, here)
        if here == 0:
            wire.add([*outgoing, *of_others[rank].parcels], [*incoming, *job.homed_at(rank).parcels])
        elif rank == 0:
            wire.add([*outgoing, *job.homed_at(here).parcels], [*incoming, *mine.parcels])
        else:
            wire.add(outgoing, incoming)
    job.peers.meet("planned")
    for rank, state in of_others.items():
        state.send(job.wires[rank])
    if here != 0:
        mine.receive(job.wires[0])
    job.share_random_state(by=0)
    job.peers.meet("begun")


def _relieved(job: StageJob) -> StageJob:
    """Without what this rank does not use of the model; a gradient is only where its parameter is."""
    job.memory.keep(job.kept)
    gradients = {g: node if g.parameter.name in job.kept else None for g, node in job.part.trace.gradients.items()}
    part = replace(job.part, stand_ins={}, trace=replace(job.part.trace, gradients=gradients))
    return replace(job, captured=replace(job.captured, stand_ins={}), part=part)


def _entries(captured: Captured) -> dict[str, Entry]:
    places = captured.trace.places
    return {entry.name: entry for entry in (*places.parameters, *places.tensors)}


def _parcels(job: StageJob, home: int, to: int) -> list[Parcel]:
    """What goes from one rank to another in a step.

    Values of one step go alone: of two that share a parcel, the first would wait for the second, which may wait for
    what the other rank makes of the first. What is sent for the next step waits for nothing of that kind.
    """
    carried = [each for each in job.crossings if (each.home, each.to) == (home, to)]
    alone = [Parcel((each.recv,), (each.size_bytes,)) for each in carried if not each.lasts]
    return [*alone, *packed((each.recv, each.size_bytes) for each in carried if each.lasts)]
