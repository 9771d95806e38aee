"""Membership of a job: ranks, what they agree on, and a wire between each two that exchange values.

Processes are started by ``torchrun``, or by anything that sets the same variables. In a job with parameter servers the
first ranks are workers and the last ones servers. Without servers all ranks are equal. Ranks announce values to all
others in torch's store, as JSON text, which is never unpickled.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from hocket.distributed.store import POLL_S, JobStore, check_peer, first_line, store_of_job
from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError

# As long as torch's own process groups wait.
DEFAULT_TIMEOUT_S = 1800.0
YEAR_S = 365 * 86400  # clocks cannot count without end
FAILED, OVER = "hocket/failed", "hocket/over"
_NUMBERS = itertools.count()  # of the jobs without servers that this process takes part in, one after another


@dataclass(frozen=True)
class Membership:
    """The place of a process in a job."""

    rank: int  # workers come first
    num_workers: int
    num_servers: int  # number of servers. If 0, all ranks are equal.
    store: JobStore  # which all ranks read
    timeout_s: float  # how long this process waits for another rank
    # number of this process among the workers that rejoined the job, from 1 on. 0 for an original rank.
    rejoin: int = 0

    @property
    def is_worker(self) -> bool:
        return self.rank < self.num_workers

    @property
    def number(self) -> int:
        """The number of this worker, or of this server."""
        return self.number_of(self.rank)

    @property
    def me(self) -> str:
        """The name of this rank in errors."""
        return self.name(self.rank)

    @property
    def others(self) -> list[int]:
        """The ranks that this one exchanges values with: servers, or workers, or all others where ranks are equal."""
        world = self.num_workers + self.num_servers
        if not self.num_servers:
            return [rank for rank in range(world) if rank != self.rank]
        return list(range(self.num_workers, world) if self.is_worker else range(self.num_workers))

    def number_of(self, rank: int) -> int:
        return rank if rank < self.num_workers else rank - self.num_workers

    def name(self, rank: int) -> str:
        """The name of a rank in errors."""
        if not self.num_servers:
            return f"rank {rank}"
        return f"{'worker' if rank < self.num_workers else 'server'} {self.number_of(rank)} (rank {rank})"

    def wires(self) -> dict[int, Wire]:
        """Connect to all `others`. Return the wires by the number of the worker or server at the other end."""
        return {self.number_of(other): self.wire(other, self.rejoin) for other in self.others}

    def wire(self, other: int, rejoin: int = 0) -> Wire:
        """Connect to one rank. `rejoin` is that of the worker at either end. Raises as `wires`."""
        low, high = sorted((self.rank, other))
        key = f"hocket/wire/{low}/{high}" + (f"/{rejoin}" if rejoin else "")
        return connected(self.store, key, int(self.rank == high), self.me, self.name(other), self.timeout_s)

    def announce(self, key: str, value: Any) -> None:
        """Put a value that JSON can hold where all ranks read it."""
        with self._reached():
            self.store.set(f"hocket/{key}", json.dumps(value))

    def announce_to_agents(self, values: Any) -> None:
        """Put the list of all values where agents read it."""
        self.announce("agents/job", {"torch": torch.__version__, "servers": self.num_servers, "values": values})

    def announced(self, key: str, by: int) -> Any:
        """Wait for the value that rank `by` announces under a key, and return it."""
        self.wait_for({f"hocket/{key}": by})
        with self._reached():
            return json.loads(self.store.get(f"hocket/{key}"))

    def meet(self, stage: str) -> None:
        """Wait until all ranks have reached a stage. Raises as `announced`."""
        with self._reached():
            self.store.set(f"hocket/{stage}/{self.rank}", "")
        world = self.num_workers + self.num_servers
        self.wait_for({f"hocket/{stage}/{rank}": rank for rank in range(world) if rank != self.rank})

    def wait_for(self, keys: dict[str, int]) -> None:
        """Wait until all keys are in the store, each with the rank that puts it there. Raises as `announced`."""
        deadline = time.monotonic() + self.timeout_s
        missing = keys
        while True:
            late = ", ".join(self.name(rank) for rank in sorted(set(missing.values())))
            with self._reached(f" while it waited for {late}"):
                missing = {key: rank for key, rank in missing.items() if not self.store.check([key])}
            if not missing:
                return
            if (ended := self.why_ended()) is not None:
                raise PeerError(f"{self.me} stops: {ended}")
            if time.monotonic() > deadline:
                late = ", ".join(self.name(rank) for rank in sorted(set(missing.values())))
                raise PeerError(f"{self.me} has waited {self.timeout_s:g} s for {late}")
            time.sleep(POLL_S)

    @contextmanager
    def _reached(self, when: str = "") -> Iterator[None]:
        """Raise a `PeerError` if the store's host exits meanwhile: rank 0, or torchrun."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{self.me} has lost the store of the job{when}: {first_line(error)}") from error

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Let all ranks read an error that is raised inside."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Record a failure of this rank, unless one is recorded or this worker rejoined a job that goes on."""
        if self.rejoin:
            return
        with suppress(RuntimeError):  # the store's host has exited
            self.store.compare_set(FAILED, "", json.dumps(self.signed(error)))

    def signed(self, error: BaseException) -> str:
        """The text of an error, beginning with the name of this rank."""
        text = str(error) if isinstance(error, Exception) else ""
        return text if text.startswith(self.me) else f"{self.me}: {text or repr(error)}"

    def leave(self, wires: Mapping[int, Wire], error: BaseException | None = None) -> None:
        """Close all wires once all posted values have arrived, or at once with an error, which fails all ranks."""
        if error is not None:
            self.fail(error)
        for wire in wires.values() if error is None else ():
            wire.flush()
        _close(wires, error)

    def failed(self, wires: Mapping[int, Wire], error: BaseException) -> PeerError:
        """Leave after an error, and return what to raise: it names the rank that failed first."""
        if (why := self._read(f"hocket/{_dropped_key(self.rank, self.rejoin)}")) is not None:
            _close(wires, error)
            return PeerError(f"{self.me} is out of the job, which goes on: {why}")
        first = self._read(FAILED)
        self.leave(wires, error)
        text = self.signed(error)
        return PeerError(text if first is None or first in text else f"{text}; the first to fail was {first}")

    def drop(self, worker: int, rejoin: int, error: BaseException) -> None:
        """Record, at a server, that the job goes on without a worker. A failure that the worker recorded is removed."""
        with suppress(RuntimeError):
            failure = self._read(FAILED)
            if failure is not None and failure.startswith(self.name(worker)):
                self.store.delete_key(FAILED)
            self.announce(_dropped_key(worker, rejoin), str(error))

    def why_ended(self) -> str | None:
        """The reason why the job has ended, or None if it goes on as far as is known."""
        if (failed := self._read(FAILED)) is not None:
            return failed
        with suppress(RuntimeError):
            return "the job is over" if self.store.check([OVER]) else None
        return None

    def end(self) -> None:
        """Record that the job is done, for processes that come late."""
        with suppress(RuntimeError):
            self.store.set(OVER, "")

    def _read(self, key: str) -> str | None:
        with suppress(RuntimeError):
            if self.store.check([key]):
                return str(json.loads(self.store.get(key)))
        return None


def _dropped_key(worker: int, rejoin: int) -> str:
    return f"out/{worker}/{rejoin}"


def _close(wires: Mapping[int, Wire], error: BaseException | None) -> None:
    for wire in wires.values():
        wire.close(reason=str(error) if error is not None else "")


def connected(store: JobStore, key: str, place: int, me: str, peer: str, timeout_s: float) -> Wire:
    """Connect two processes that name the same key in a store, which no other wire has. One of them has `place` 0."""
    try:
        group, records = (
            ProcessGroupGloo(PrefixStore(f"{key}/{of}", store), place, 2, store.options(timeout_s))
            for of in ("bytes", "records")
        )
        for end, of in ((group, "bytes"), (records, "records")):
            check_peer(end, place, f"{key}/{of}", store.secret, me, peer)
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"{me} cannot connect to {peer}: {error}") from error
    return Wire(group, records, place, me, peer, timeout_s)


def join(num_servers: int, timeout_s: float) -> Membership:
    """Take part in the job that torchrun has started. Its last ranks are servers. Without any all ranks are equal."""
    is_time = isinstance(timeout_s, (int, float)) and 0 < timeout_s < YEAR_S
    expected = "a number of seconds above 0 and less than a year"
    wrong = "" if is_time else f"distribute: expected timeout_s to be {expected}, got {timeout_s!r}"
    missing = ", ".join(name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ)
    if missing:
        raise InputError(wrong or f"distribute: {missing} not set; start the job with torchrun, or with `hocket ps`")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store_of_job(rank, timeout_s if is_time else DEFAULT_TIMEOUT_S)
    if not num_servers:  # agents, and workers that come again, know the keys of the first job alone
        store = store.within(f"{_restarts()}.{next(_NUMBERS)}/")
    found = Membership(rank, world - num_servers, num_servers, store, timeout_s)
    with found.reporting_errors():  # others wait for this rank
        if wrong:
            raise InputError(wrong)
        if world <= num_servers:
            raise InputError(f"distribute: {world} ranks, and {num_servers} of them servers: none is left to work")
    return found


def _restarts() -> str:
    """The number of times that torchrun has started all ranks anew, with the store of before. Machines count alone."""
    is_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine else "0"
