"""How a job of equal ranks begins, in which each runs a part of one captured step, and what they tell each other.

    capture | compare with rank 0 | wires | rank 0 divides and plans for all | check | rank 0's state to all

Nothing of a peer is believed before: sizes, names and dtypes are those that this rank captured itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.distributed.description import described, difference, digest, kind_in_words
from hocket.distributed.parcels import Parcel
from hocket.distributed.parts import check_exchangeable
from hocket.distributed.setup import ORDERS, PROBE, PROBE_BYTES, rates_of
from hocket.distributed.stages.checkpoint import LOADED
from hocket.distributed.stages.crossings import Borders
from hocket.distributed.stages.from_file import ModelFile, check_fresh, check_optimizers_begin_from_zeros
from hocket.distributed.stages.migration import READY
from hocket.distributed.stages.on_meta import captured_at, given_memory
from hocket.distributed.stages.part_memory import PartMemory
from hocket.distributed.stages.peers import Peers
from hocket.distributed.stages.rebalancing import NUM_SHARES, SHARES
from hocket.distributed.stages.stage_job import RANDOM, StageJob, divided, places_of, relieved, step_parcels
from hocket.distributed.state import ShardState, begin_from_zeros, has_state, make_state
from hocket.distributed.wire import Wire
from hocket.errors import PeerError
from hocket.ir import Plan
from hocket.tracing.captured import Captured

__all__ = ["begun_job"]

# What every two ranks tell each other where ops may move: their shares, and a digest of the plan that they have made.
MOVE_NOTES = (Parcel((SHARES,), (8 * NUM_SHARES,)), Parcel((READY,), (8,)))


def begun_job(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    peers: Peers,
    planned: Callable[[Captured, Borders, int, float], Plan],
    rebalance: int = 0,
    weights: str | os.PathLike[str] | None = None,
) -> StageJob:
    """Capture, compare, connect, divide; and all ranks get the state that rank 0 has, or that is in a file.

    Args:
        step: the user's own.
        model: what it trains, one or a list.
        optimizer: as well.
        batch: of the first step.
        peers: this process's place.
        planned: makes the joined plan, on rank 0; it is told the whole step, its borders, how many ranks there are,
            and bytes per second between them.
        rebalance: after how many steps ranks look whether ops should move; 0: never.
        weights: the file that has the model's values; None: rank 0 has them.

    Raises:
        CaptureError, InputError: the step cannot be captured, or divided; says why.
        PeerError: another rank trains something else, has failed, or does not come.
    """
    wires: dict[int, Wire] = {}
    file: ModelFile | None = None
    try:
        if weights is not None:
            file = ModelFile(model, weights)
            check_fresh(model, optimizer)
        in_file: Mapping[str, Any] = {} if file is None else file.stored
        captured = captured_at(peers.rank, step, model, optimizer, batch, in_file)
        _agree(captured, batch, peers, rebalance, file)
        captured = given_memory(captured)
        check_exchangeable(captured, 1)
        wires.update(zip(peers.others, peers.wires(), strict=True))
        borders = Borders(captured)
        loaded = Parcel((LOADED,), (8 * (2 + len(places_of(captured))),))
        rate = _rate(captured, peers, wires, [loaded, *(MOVE_NOTES if rebalance else ())])
        if peers.rank == 0:
            peers.tell("plan", str(planned(captured, borders, peers.num_workers, rate)))
        plan = Plan.parse(peers.told("plan", by=0))
        all_parts = peers.rank == 0 or rebalance > 0
        job = divided(captured, borders, peers, wires, plan, PartMemory(places_of(captured)), all_parts=all_parts)
        _lay_wires(job, file)
        if rebalance:  # ops may come here with their state, which has to have a place
            make_state(captured, job.entries)
        job.memory.keep(job.kept)
        job = relieved(job)
    except BaseException as error:
        if isinstance(error, PeerError):
            raise peers.failed(wires, error) from error
        peers.leave(wires, error)
        raise
    finally:
        if file is not None:
            file.close()
    return job


def _agree(captured: Captured, batch: Any, peers: Peers, rebalance: int, file: ModelFile | None) -> None:
    mine = described(captured, peers.num_workers, 0)
    mine["job"] |= {"rebalance": str(rebalance), "weights": "of rank 0" if file is None else f"a file {file.digest}"}
    for name in mine["constant"].keys() & (() if file is None else file.stored):
        del mine["constant"][name]
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


def _rate(captured: Captured, peers: Peers, wires: Mapping[int, Wire], notes: Sequence[Parcel]) -> float:
    """Bytes per second that rank 0 sends to one rank after the other; infinite at all other ranks.

    Lays what wires carry besides steps; `notes` are what every two ranks tell each other.
    """
    control = [Parcel((ORDERS,), (8 * (1 + len(rates_of(captured))),)), Parcel((PROBE,), (PROBE_BYTES,))]
    mutual = [Parcel((RANDOM,), (torch.get_rng_state().numel(),)), *notes]
    for rank, wire in wires.items():
        outgoing = control if peers.rank == 0 else []
        wire.add([*outgoing, *mutual], [*(control if rank == 0 else []), *mutual])
    peers.meet("wired")
    memory = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    if peers.rank != 0:
        wires[0].get(PROBE, memory)
        return float("inf")
    began = time.perf_counter()
    for wire in wires.values():
        wire.put(PROBE, memory)
    return PROBE_BYTES * len(wires) / (time.perf_counter() - began)


def _lay_wires(job: StageJob, file: ModelFile | None) -> None:
    """What wires carry in a step, and once; then every rank takes the state that rank 0 has, or that is in a file."""
    here = job.peers.rank
    if file is not None:
        if here == 0:
            check_optimizers_begin_from_zeros(job.captured)
        make_state(job.captured, job.kept)
    elif here == 0 and not has_state(job.captured):
        begin_from_zeros(job.captured)
    of_others = {rank: _taken_at(job, rank, file) for rank in job.peers.others} if here == 0 else {}
    mine = _taken_at(job, here, file)
    for rank, wire in job.wires.items():
        outgoing, incoming = step_parcels(job, here, rank), step_parcels(job, rank, here)
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
    if file is not None:
        file.read(job.entries[name] for name in sorted(job.kept))
    job.share_random_state(by=0)
    job.peers.meet("begun")


def _taken_at(job: StageJob, rank: int, file: ModelFile | None) -> ShardState:
    """What a rank takes from rank 0: all that its part uses; or, of that, what no file has, and no state."""
    if file is None:
        return job.used_at(rank)
    entries = [entry for name, entry in job.entries.items() if name in job.used[rank] and name not in file.stored]
    return ShardState(rank, tuple(entry for entry in entries if entry.kind != "state"))
