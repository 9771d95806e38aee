"""The start of a job of equal ranks, each of which runs a part of one captured step.

    capture | compare with rank 0 | wires | rank 0 divides and plans for all | check | rank 0's state to all

Nothing that a peer sends is trusted: sizes, names and dtypes are those that this rank captured itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.distributed.description import described, digest, kind_of
from hocket.distributed.job import COMMANDS, PROBE, PROBE_BYTES, JoinedJob
from hocket.distributed.membership import Membership
from hocket.distributed.packets import Packet
from hocket.distributed.parts import check_exchangeable
from hocket.distributed.setup import compare
from hocket.distributed.stages.checkpoint import LOADED
from hocket.distributed.stages.crossings import Borders
from hocket.distributed.stages.from_file import ModelFile, check_fresh, check_optimizers_begin_from_zeros
from hocket.distributed.stages.memory import PartMemory, captured_at, given_memory
from hocket.distributed.stages.rebalancing import NUM_SHARES, READY, SHARES
from hocket.distributed.stages.stage_job import RANDOM, StageJob, divided, places_of, trimmed
from hocket.distributed.staging import devices_of, random_state
from hocket.distributed.state import ShardState, begin_from_zeros, make_state
from hocket.errors import InputError, PeerError
from hocket.ir import Plan
from hocket.tracing.captured import Captured

# Packets between every two ranks where ops may move: their shares, and a hash of the new plan.
MOVE_PACKETS = (Packet((SHARES,), (8 * NUM_SHARES,)), Packet((READY,), (8,)))


def begun_job(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    membership: Membership,
    planned: Callable[[Captured, Borders, int, float], Plan],
    rebalance: int = 0,
    weights: str | os.PathLike[str] | None = None,
) -> StageJob:
    """Capture, compare, connect and divide, and give all ranks the state of rank 0 or of a file.

    `planned` makes the plan at rank 0, from the whole step, its borders, the number of ranks, and the bytes per second
    between them.
    """
    file: ModelFile | None = None
    connected: JoinedJob | None = None
    try:
        if weights is not None:
            file = ModelFile(model, weights)
            check_fresh(model, optimizer)
        in_file: Mapping[str, Any] = {} if file is None else file.stored
        captured = captured_at(membership.rank, step, model, optimizer, batch, in_file)
        if rebalance and devices_of(model):
            raise InputError("distribute: rebalance= compares how busy cores are, and the step is on a GPU")
        _agree(captured, batch, membership, rebalance, file)
        captured = given_memory(captured)
        check_exchangeable(captured, 1)
        connected = JoinedJob(membership, captured, membership.wires())
        borders, memory = Borders(captured), PartMemory(places_of(captured))
        loaded = Packet((LOADED,), (8 * (2 + len(places_of(captured))),))
        rate = _rate(connected, [loaded, *(MOVE_PACKETS if rebalance else ())])
        if membership.rank == 0:
            membership.announce("plan", str(planned(captured, borders, membership.num_workers, rate)))
        plan = Plan.parse(membership.announced("plan", by=0))
        job = divided(connected, borders, plan, memory, all_parts=membership.rank == 0 or rebalance > 0)
        _exchange_state(job, file)
        if rebalance:  # ops may come here with their state, which needs a place
            make_state(captured, job.entries)
        memory.keep(job.kept)
        return trimmed(job)
    except BaseException as error:
        wires = {} if connected is None else connected.wires
        if isinstance(error, PeerError):
            raise membership.failed(wires, error) from error
        membership.leave(wires, error)
        raise
    finally:
        if file is not None:
            file.close()


def _agree(captured: Captured, batch: Any, membership: Membership, rebalance: int, file: ModelFile | None) -> None:
    mine = described(captured, membership.num_workers, 0)
    mine["job"] |= {"rebalance": str(rebalance), "weights": "of rank 0" if file is None else f"a file {file.digest}"}
    mine["job"]["GPUs of a rank"] = str(len(devices_of(captured.trace.places.models)))  # each has a random generator
    for name in mine["constant"].keys() & (() if file is None else file.stored):
        del mine["constant"][name]
    of_graph = {kind: mine.pop(kind) for kind in ("op", "constant")}
    leaves = {
        f"leaf {number}": f"{kind_of(leaf)} with digest {digest(leaf)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for number, leaf in enumerate(tree_flatten(batch)[0])
    }
    compare(membership, mine | {"batch": leaves} | of_graph)
    membership.meet("agreed")


def _rate(job: JoinedJob, packets: Sequence[Packet]) -> float:
    """The bytes per second from rank 0 to one rank after the other. Infinite at all other ranks.

    Adds the packets of all wires that do not belong to steps. `packets` go between every two ranks.
    """
    here = job.membership.rank
    control = [Packet((COMMANDS,), (job.command_bytes,)), Packet((PROBE,), (PROBE_BYTES,))]
    mutual = [Packet((RANDOM,), (random_state(job.devices).numel(),)), *packets]
    for rank, wire in job.wires.items():
        wire.add([*(control if here == 0 else []), *mutual], [*(control if rank == 0 else []), *mutual])
    job.membership.meet("wired")
    memory = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    if here != 0:
        job.wires[0].get(PROBE, memory)
        return float("inf")
    began = time.perf_counter()
    for wire in job.wires.values():
        wire.put(PROBE, memory)
    return PROBE_BYTES * len(job.wires) / (time.perf_counter() - began)


def _exchange_state(job: StageJob, file: ModelFile | None) -> None:
    """Add all packets of steps and of state, and give every rank the state of rank 0 or of a file."""
    here = job.rank
    if file is not None:
        if here == 0:
            check_optimizers_begin_from_zeros(job.captured)
        make_state(job.captured, job.kept)
    elif here == 0:
        begin_from_zeros(job.captured)
    of_others = {rank: _taken_at(job, rank, file) for rank in job.membership.others} if here == 0 else {}
    mine = _taken_at(job, here, file)
    for rank, wire in job.wires.items():
        outgoing, incoming = job.step_packets(here, rank), job.step_packets(rank, here)
        if here == 0:
            wire.add([*outgoing, *of_others[rank].packets], [*incoming, *job.homed_at(rank).packets])
        elif rank == 0:
            wire.add([*outgoing, *job.homed_at(here).packets], [*incoming, *mine.packets])
        else:
            wire.add(outgoing, incoming)
    job.membership.meet("planned")
    for rank, state in of_others.items():
        state.send(job.wires[rank])
    if here != 0:
        mine.receive(job.wires[0])
    if file is not None:
        file.read(job.entries[name] for name in sorted(job.kept))
    job.share_random_state(by=0)
    job.membership.meet("begun")


def _taken_at(job: StageJob, rank: int, file: ModelFile | None) -> ShardState:
    """The state that a rank takes from rank 0: what its part uses, without optimizer state or values of a file."""
    if file is None:
        return job.used_at(rank)
    entries = [entry for name, entry in job.entries.items() if name in job.used[rank] and name not in file.stored]
    return ShardState(rank, tuple(entry for entry in entries if entry.kind != "state"))
