"""Who takes part in a job, what they agree on, and a wire between each worker and each server.

Processes are started by ``torchrun``, or by anything that sets the same variables; the first ranks are workers, the
last ones servers. What they say to all others, they say in torch's store: text, which is never unpickled.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError

__all__ = ["DEFAULT_TIMEOUT_S", "POLL_S", "Membership", "connected", "job_store", "join", "meet_at", "waited"]

# As long as torch's own process groups wait.
DEFAULT_TIMEOUT_S = 1800.0
POLL_S = 0.02
OVER = "hocket/over"


@dataclass(frozen=True)
class Membership:
    """A process's place in a job.

    Attributes:
        rank: of this process; workers come first.
        num_workers: how many of them there are.
        num_servers: as well.
        store: what all ranks can read.
        timeout_s: how long a rank is waited for.
        coming: which of the workers that came again it is, counted in the job from 1 on; 0: it was there from the
            beginning.
    """

    rank: int
    num_workers: int
    num_servers: int
    store: Any
    timeout_s: float
    coming: int = 0

    @property
    def is_worker(self) -> bool:
        return self.rank < self.num_workers

    @property
    def number(self) -> int:
        """The number of this worker, or of this server."""
        return self.rank if self.is_worker else self.rank - self.num_workers

    def name(self, rank: int) -> str:
        """What a rank is called in errors.

        Example:
            >>> Membership(0, 2, 1, None, 1.0).name(2)
            'server 0 (rank 2)'
        """
        worker = rank < self.num_workers
        return f"{'worker' if worker else 'server'} {rank if worker else rank - self.num_workers} (rank {rank})"

    def wires(self) -> list[Wire]:
        """A wire to each server, or of a server to each worker.

        Raises:
            PeerError: one of them does not answer within the timeout.
        """
        others = (
            range(self.num_workers, self.num_workers + self.num_servers) if self.is_worker else range(self.num_workers)
        )
        found = []
        for other in others:
            pair = (self.rank, other) if self.is_worker else (other, self.rank)
            place = 0 if self.is_worker else 1
            key = self.wire_key(*pair, self.coming)
            found.append(connected(self.store, key, place, self.name(self.rank), self.name(other), self.timeout_s))
        return found

    @staticmethod
    def wire_key(worker_rank: int, server_rank: int, coming: int) -> str:
        """The key of the wire between a worker and a server."""
        return f"hocket/wire/{worker_rank}/{server_rank}" + (f"/{coming}" if coming else "")

    def tell(self, key: str, value: Any) -> None:
        """Tell all ranks something that JSON can say."""
        self.store.set(f"hocket/{key}", json.dumps(value))

    def tell_agents(self, values: Any) -> None:
        """Tell agents what they can have."""
        self.tell("agents/job", {"torch": torch.__version__, "servers": self.num_servers, "values": values})

    def told(self, key: str, by: int) -> Any:
        """What rank `by` tells; waits for it.

        Raises:
            PeerError: it does not within the timeout, or some rank has failed.
        """
        self.wait_for({f"hocket/{key}": by})
        return json.loads(self.store.get(f"hocket/{key}"))

    def meet(self, stage: str) -> None:
        """Wait until all ranks have come to a stage; raises as `told`."""
        self.store.set(f"hocket/{stage}/{self.rank}", "")
        world = self.num_workers + self.num_servers
        self.wait_for({f"hocket/{stage}/{rank}": rank for rank in range(world) if rank != self.rank})

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed, unless another one has before, or the job goes on without it."""
        if self.coming:
            return
        with suppress(RuntimeError):  # the store is gone with whoever kept it
            self.store.compare_set("hocket/failed", "", json.dumps(self.signed(error)))

    def signed(self, error: BaseException) -> str:
        """An error in words that begin with this rank's name."""
        me = self.name(self.rank)
        return str(error) if str(error).startswith(me) else f"{me}: {error}"

    def let_go(self, worker: int, coming: int, error: BaseException) -> None:
        """A server says that the job goes on without a worker; what that said of its failure is not the job's."""
        with suppress(RuntimeError):
            failure = self.first_failure()
            if failure is not None and failure.startswith(self.name(worker)):
                self.store.delete_key("hocket/failed")
            self.tell(_out_key(worker, coming), str(error))

    def why_out(self) -> str | None:
        """Why the job goes on without this worker; None: it does not, as far as is known."""
        key = f"hocket/{_out_key(self.rank, self.coming)}"
        with suppress(RuntimeError):
            if self.store.check([key]):
                return str(json.loads(self.store.get(key)))
        return None

    def first_failure(self) -> str | None:
        """What the first rank said that failed."""
        with suppress(RuntimeError):
            if self.store.check(["hocket/failed"]):
                return str(json.loads(self.store.get("hocket/failed")))
        return None

    def why_ended(self) -> str | None:
        """What ended the job: a failure, or that it is done; None: it goes on, as far as is known."""
        if (failed := self.first_failure()) is not None:
            return failed
        return "the job is over" if self.store.check([OVER]) else None

    def is_over(self) -> None:
        """Rank 0 tells whoever comes late that the job is done."""
        with suppress(RuntimeError):
            self.store.set(OVER, "")

    def wait_for(self, keys: dict[str, int]) -> None:
        """Wait until all these keys are in the store, each with the rank that is to put it there.

        Raises:
            PeerError: they are not within the timeout, or the job has ended.
        """
        deadline = time.monotonic() + self.timeout_s
        while missing := {key: rank for key, rank in keys.items() if not self.store.check([key])}:
            if (ended := self.why_ended()) is not None:
                raise PeerError(f"{self.name(self.rank)} stops: {ended}")
            if time.monotonic() > deadline:
                late = ", ".join(self.name(rank) for rank in sorted(set(missing.values())))
                raise PeerError(f"{self.name(self.rank)} has waited {self.timeout_s:g} s for {late}")
            time.sleep(POLL_S)


def _out_key(worker: int, coming: int) -> str:
    return f"out/{worker}/{coming}"


def connected(store: Any, key: str, place: int, me: str, peer: str, timeout_s: float) -> Wire:
    """One end of a wire between two processes that name the same `key` in a store.

    Args:
        store: what both can read.
        key: of this wire alone.
        place: 0 at one end, 1 at the other.
        me: what this process is called in errors.
        peer: what the other one is called.
        timeout_s: how long the peer is waited for, then and later.

    Raises:
        PeerError: it does not answer within the timeout.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        group, records = (
            ProcessGroupGloo(PrefixStore(f"{key}/{of}", store), place, 2, timeout) for of in ("bytes", "records")
        )
    except RuntimeError as error:
        raise PeerError(f"{me} found no way to {peer}: {error}") from error
    return Wire(group, records, place, me, peer, timeout_s)


def waited(store: Any, key: str, who: str, timeout_s: float) -> str:
    """What is in a store under a key, as soon as it is there.

    Raises:
        PeerError: it does not come within the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerError(f"{who}, after {timeout_s:g} s")
        time.sleep(POLL_S)
    return str(store.get(key).decode())


def meet_at(store: Any, key: str, place: int, peer: str, timeout_s: float) -> None:
    """Wait until both ends of the wire of this key have come so far; raises as `waited`."""
    store.set(f"{key}/at {place}", "")
    waited(store, f"{key}/at {1 - place}", f"{peer} does not answer", timeout_s)


def job_store(timeout_s: float) -> tuple[Any, int, int]:
    """The store of the job that torchrun has started, the rank of this process, and how many there are.

    Raises:
        InputError: torchrun has not started this process.
        PeerError: the store does not answer.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"distribute: {', '.join(missing)} not set; start the job with torchrun, or with `hocket ps`")
    try:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"rank {os.environ['RANK']} does not reach the store of the job: {error}") from error
    return store, rank, world


def join(num_servers: int, timeout_s: float) -> Membership:
    """Take part in the job that torchrun has started.

    Args:
        num_servers: how many of the ranks, the last ones, are servers.
        timeout_s: how long any rank is waited for.

    Raises:
        InputError: torchrun has not started this process, or there are too few ranks.
        PeerError: the store does not answer.
    """
    if num_servers < 1:
        raise InputError(f"distribute: expected at least one server, got {num_servers}")
    store, rank, world = job_store(timeout_s)
    if world <= num_servers:
        raise InputError(f"distribute: {world} ranks, and {num_servers} of them servers: none is left to work")
    return Membership(rank, world - num_servers, num_servers, store, timeout_s)
