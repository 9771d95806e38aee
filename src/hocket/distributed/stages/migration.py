r"""`migrated`: ops change rank between two steps, with all that lives where they live.

Every rank has the whole captured step, so each makes its new part by itself, and all compare what they made::

    divide anew, check all parts | lay wires | compare | state to its new homes | memory of the rest goes back

Before a migration nothing is on its way. Then each value has one home, and copies elsewhere are current. Gradients need
not move: a step drops those that it finds. The generator's state is everywhere after each step. Numbers of Python that
a step counts on are refused when a job begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hocket.distributed.parcels import Parcel
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.joined import joined_plan
from hocket.distributed.stages.stage_job import StageJob, divided, relieved, step_parcels
from hocket.distributed.state import ShardState
from hocket.errors import PeerError

__all__ = ["READY", "Migration", "MovedOps", "compare", "divided_anew", "migrated"]

READY = "ready"


class MovedOps(NamedTuple):
    """Ops that went from one rank to another as one."""

    ops: tuple[str, ...]
    source: int
    target: int


@dataclass(frozen=True)
class Migration:
    """What moved between two steps of a job.

    Attributes:
        step: how many steps had run.
        moved: which ops, from where, to where.
        size_bytes: parameters, buffers and optimizer state that went along, of all ranks.
        took_us: on this rank.
        why: the numbers that it was decided by.
        refused: why the ops stayed where they were; empty: they moved.

    Example:
        >>> print(Migration(20, (MovedOps(("mm", "add"), 1, 0),), 4096, 2e4, "rank1 is slow"))
        after step 20: 2 ops ('mm', ...) from rank1 to rank0, 4,096 bytes of state, in 20.0 ms: rank1 is slow
    """

    step: int
    moved: tuple[MovedOps, ...]
    size_bytes: int
    took_us: float
    why: str
    refused: str = ""

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


def divided_anew(job: StageJob, rank_of: Mapping[str, int], order: Sequence[str]) -> StageJob:
    """The job as it is when ops have moved; nothing has happened yet.

    Args:
        job: as it is now.
        rank_of: the new rank of each op.
        order: all ops, in a topological order.

    Raises:
        InputError, PlanError: it could not compute as the whole step does; says why.
    """
    ranks, since = job.peers.num_workers, job.since + 1
    borders = Borders(job.captured)
    borders.check(rank_of, ranks)
    width = next(lane.width for lane in job.plan.lanes if lane.kind == "cores")
    crossings = borders.crossings(rank_of, ranks, since)
    plan = joined_plan(job.captured.graph, order, rank_of, crossings, width)
    return divided(job.captured, borders, job.peers, job.wires, plan, job.memory, all_parts=True, since=since)


def migrated(before: StageJob, after: StageJob) -> tuple[StageJob, int]:
    """Bring everything to where it lives from now on; every rank calls this at the same time, and no step runs.

    Args:
        before: the job as it is; nothing is on its way.
        after: what `divided_anew` has made of it.

    Returns:
        The job as it goes on, and how many bytes of state went from one rank to another.

    Raises:
        PeerError: a rank is gone or silent, or has made another division; names it.
    """
    here, ranks = before.peers.rank, range(before.peers.num_workers)
    arriving = {rank: _arriving(before, after, rank) for rank in ranks}
    for rank, wire in after.wires.items():
        outgoing = [*step_parcels(after, here, rank), *_parcels(after, _moving(after, arriving, here, rank))]
        incoming = [*step_parcels(after, rank, here), *_parcels(after, _moving(after, arriving, rank, here))]
        if rank == 0:
            outgoing += _parcels(after, after.homed_at(here))
        if here == 0:
            incoming += _parcels(after, after.homed_at(rank))
        wire.add(outgoing, incoming)
    compare(before, after.plan_digest)
    after.memory.restore(after.kept)
    for rank, wire in after.wires.items():
        _moving(after, arriving, here, rank).post(wire)
    for rank, wire in after.wires.items():
        _moving(after, arriving, rank, here).receive(wire)
    after.memory.keep(after.kept)
    moved = sum(after.memory.size_bytes(name) for of in arriving.values() for names in of.values() for name in names)
    return relieved(after), moved


def compare(job: StageJob, digest: int) -> None:
    """Return when all ranks have come so far, if they have made the same plan.

    Args:
        job: as it is.
        digest: of the plan (`StageJob.plan_digest`); 0: there is none, and nothing moves.

    Raises:
        PeerError: a rank is gone or silent, or has made another one; names it.
    """
    mine = torch.tensor([digest], dtype=torch.int64)
    for rank, theirs in job.exchanged(READY, mine).items():
        if not torch.equal(theirs, mine):
            raise PeerError(
                f"{job.peers.name(job.peers.rank)} moves ops to other places than {job.peers.name(rank)}: all ranks "
                "decide by the same numbers"
            )


def _arriving(before: StageJob, after: StageJob, rank: int) -> dict[int, list[str]]:
    """What a rank gets, by the rank that it comes from: of what it becomes the home, and what it did not have.

    What the home sends for each step comes as at the beginning (`StageJob.first_values`).
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


def _moving(after: StageJob, arriving: Mapping[int, Mapping[int, list[str]]], source: int, target: int) -> ShardState:
    entries = tuple(after.entries[name] for name in arriving[target].get(source, ()))
    return ShardState(target, entries, f"moved~{after.since}/")


def _parcels(job: StageJob, state: ShardState) -> list[Parcel]:
    """One for each tensor, as large as it is where it has its memory."""
    return [Parcel((state.name_of(entry),), (job.memory.size_bytes(entry.name),)) for entry in state.tensors]
