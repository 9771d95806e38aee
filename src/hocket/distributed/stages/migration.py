r"""`migrated`: ops change rank between two steps, with all state whose home they change.

Every rank has the whole captured step, so each makes its new part by itself, and all compare their plans::

    divide again, check all parts | add packets | compare | state to its new homes | release other memory

Before a migration no transfer is under way, so each value has one home, and copies elsewhere are current. Gradients do
not move, since a step drops those that it finds. The generator's state is the same everywhere after each step. Numbers
of Python that a step reads are refused when a job begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hocket.distributed.packets import Packet
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.joined import joined_plan
from hocket.distributed.stages.stage_job import StageJob, divided, trimmed
from hocket.distributed.state import ShardState
from hocket.errors import PeerError

READY = "ready"


class MovedOps(NamedTuple):
    """Ops that moved together from one rank to another."""

    ops: tuple[str, ...]
    source: int
    target: int


@dataclass(frozen=True)
class Migration:
    """Ops and state that moved between two steps of a job.

    Attributes:
        step: number of steps before.
        moved: ops, with their old and new ranks.
        size_bytes: parameters, buffers and optimizer state that moved, over all ranks.
        took_us: duration at this rank.
        why: the measurements behind the decision.
        refused: the reason why the ops stayed where they were, or empty if they moved.

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


def divided_again(job: StageJob, rank_of: Mapping[str, int], order: Sequence[str]) -> StageJob:
    """The job after a migration that has not happened yet.

    Raises:
        InputError, PlanError: the division could not compute as the whole step does.
    """
    since, borders = job.since + 1, Borders(job.captured)
    borders.check(rank_of, job.num_ranks)
    width = next(lane.width for lane in job.plan.lanes if lane.kind == "cores")
    crossings = borders.crossings(rank_of, job.num_ranks, since)
    plan = joined_plan(job.captured.graph, order, rank_of, crossings, width)
    return divided(job, borders, plan, job.memory, all_parts=True, since=since)


def migrated(before: StageJob, after: StageJob) -> tuple[StageJob, int]:
    """Move all state to its new home. Every rank calls this at the same time, while no step runs.

    Args:
        before: the present job, with no transfer under way.
        after: the job that `divided_again` returned.

    Returns:
        The new job, and the number of bytes of state that went from one rank to another.

    Raises:
        PeerError: a rank is gone or silent, or has made another division, and is named.
    """
    here = before.rank
    arriving = {rank: _arriving(before, after, rank) for rank in range(before.num_ranks)}

    def moving(source: int, target: int) -> ShardState:
        entries = tuple(after.entries[name] for name in arriving[target].get(source, ()))
        return ShardState(target, entries, f"moved~{after.since}/")

    for rank, wire in after.wires.items():
        outgoing = [*after.step_packets(here, rank), *_packets(after, moving(here, rank))]
        incoming = [*after.step_packets(rank, here), *_packets(after, moving(rank, here))]
        if rank == 0:
            outgoing += _packets(after, after.homed_at(here))
        if here == 0:
            incoming += _packets(after, after.homed_at(rank))
        wire.add(outgoing, incoming)
    compare_plans(before, after.plan_digest)
    after.memory.restore(after.kept)
    for rank, wire in after.wires.items():
        moving(here, rank).post(wire)
    for rank, wire in after.wires.items():
        moving(rank, here).receive(wire)
    after.memory.keep(after.kept)
    moved = sum(after.memory.size_bytes(name) for of in arriving.values() for names in of.values() for name in names)
    return trimmed(after), moved


def compare_plans(job: StageJob, digest: int) -> None:
    """Wait until all ranks have reached this point, and check that they have made the same plan.

    Args:
        job: the present job.
        digest: hash of the plan (`StageJob.plan_digest`), or 0 if ops do not move.

    Raises:
        PeerError: a rank is gone or silent, or has made another plan, and is named.
    """
    mine = torch.tensor([digest], dtype=torch.int64)
    for rank, theirs in job.exchanged(READY, mine).items():
        if not torch.equal(theirs, mine):
            raise PeerError(
                f"{job.membership.me} moves ops to other places than {job.membership.name(rank)}: all ranks decide by "
                "the same numbers"
            )


def _arriving(before: StageJob, after: StageJob, rank: int) -> dict[int, list[str]]:
    """Names of state that a rank receives, by source: state that changes its home to it, and state that it lacked.

    Values that the home sends in each step come as at the beginning (`RunningPart`).
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


def _packets(job: StageJob, state: ShardState) -> list[Packet]:
    """One packet for each tensor, of its size when it has memory."""
    return [Packet((state.name_of(entry),), (job.memory.size_bytes(entry.name),)) for entry in state.tensors]
