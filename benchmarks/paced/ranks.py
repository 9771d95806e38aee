r"""Paced workers and their servers: processes that sleep what they would compute, and move bytes over real wires.

    server 0   go --------.                             .--> finished by all: go again
    worker     requests --'--> values arrive, work is slept --'

In turns all workers receive in the planned order, which the sender keeps, and each one in an order of its own, drawn
anew for each step, as frameworks without an order do.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.namespaces import Namespace, enter
from benchmarks.paced.workload import Workload
from hocket.distributed.membership import connected
from hocket.distributed.packets import Packet
from hocket.distributed.store import meet_at, opened
from hocket.distributed.wire import Wire
from hocket.planning.transfers.receives import Receives

TIMEOUT_S = 60.0
GO, FINISHED = "go", "finished"


@dataclass(frozen=True)
class Place:
    """The position of one rank in a cluster: workers come first."""

    rank: int
    workers: int
    servers: int
    chunk_bytes: int
    store: tuple[str, int]
    end: Namespace


@dataclass(frozen=True)
class StepRecord:
    """One step of one worker, by the clock that all processes of the machine share."""

    order: tuple[int, ...]
    is_planned: bool
    begin_ns: int
    end_ns: int


def run_rank(pipe: Any, place: Place, work: Workload, steps: int) -> None:
    """A process: what a worker records goes into the pipe, and so does an error."""
    try:
        enter(place.end.name)
        os.environ["GLOO_SOCKET_IFNAME"] = place.end.interface
        wires = _wires(place, work)
        if place.rank < place.workers:
            pipe.send(_work(place, work, wires, steps))
        else:
            _serve(place, work, wires, steps)
            pipe.send([])
        for wire in wires:
            wire.close()
    except BaseException as error:
        pipe.send(f"rank {place.rank}: {type(error).__name__}: {error}")
        raise


def _wires(place: Place, work: Workload) -> list[Wire]:
    store = opened(*place.store, TIMEOUT_S)
    is_worker = place.rank < place.workers
    others = range(place.workers, place.workers + place.servers) if is_worker else range(place.workers)
    found = []
    for other in others:
        worker, server = (place.rank, other) if is_worker else (other, place.rank)
        key, end = f"paced/{worker}/{server}", 0 if is_worker else 1
        wire = connected(store, key, end, f"rank {place.rank}", f"rank {other}", TIMEOUT_S)
        mine = [index for index in work.planned if work.receives.links[index] == server - place.workers]
        planned = [Packet((_name(index, True),), (work.sizes[index],), place.chunk_bytes) for index in mine]
        free = [Packet((_name(index, False),), (work.sizes[index],), place.chunk_bytes) for index in mine]
        down, up = [Packet((GO,), (8,)), *free], [Packet((FINISHED,), (8,))]
        wire.add(*((up, down) if is_worker else (down, up)))
        wire.add(*(((), planned) if is_worker else (planned, ())), ordered=True)
        meet_at(store, key, end, f"rank {other}", TIMEOUT_S)
        found.append(wire)
    return found


def _serve(place: Place, work: Workload, wires: list[Wire], steps: int) -> None:
    number = place.rank - place.workers
    values = {
        i: torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(work.sizes) if work.receives.links[i] == number
    }
    told = torch.zeros(1, dtype=torch.int64)
    for step in range(1, steps + 1):
        for wire in wires:
            for index, tensor in values.items():
                wire.send(_name(index, _is_planned(step)), tensor, step, lambda error: None)
        if number == 0:
            for wire in wires:
                wire.post(GO, told)
            for wire in wires:
                wire.get(FINISHED, torch.empty(1, dtype=torch.int64))
    if number:
        wires[0].get(FINISHED, told)  # of worker 0, at the end


def _work(place: Place, work: Workload, wires: list[Wire], steps: int) -> list[StepRecord]:
    memory = [torch.empty(size, dtype=torch.uint8) for size in work.sizes]
    found = []
    for step in range(1, steps + 1):
        order = work.planned
        if not _is_planned(step):
            order = tuple(random.Random(f"{place.rank}/{step}").sample(order, len(order)))
        wires[0].get(GO, torch.empty(1, dtype=torch.int64))
        begin_ns = time.perf_counter_ns()
        pace = _Pace(work.receives)
        for index in order:
            name = _name(index, _is_planned(step))
            wires[work.receives.links[index]].receive(name, memory[index], step, pace.arrival(index))
        pace.run()
        found.append(StepRecord(order, _is_planned(step), begin_ns, time.perf_counter_ns()))
        wires[0].put(FINISHED, torch.zeros(1, dtype=torch.int64))
    for wire in wires[1:] if place.rank == 0 else ():
        wire.put(FINISHED, torch.zeros(1, dtype=torch.int64))
    return found


class _Pace:
    """Sleeps the work of one step, each group when all that it needs has arrived."""

    def __init__(self, receives: Receives) -> None:
        self._left = list(zip(receives.groups, receives.works_us, strict=True))
        self._missing = (1 << len(receives)) - 1
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def arrival(self, index: int) -> Any:
        """Return the function that a wire calls when a value has arrived."""

        def arrived(error: BaseException | None) -> None:
            with self._changed:
                self._missing &= ~(1 << index)
                self._failure = self._failure or error
                self._changed.notify()

        return arrived

    def run(self) -> None:
        """All of it, and the last arrival."""
        free_s = time.perf_counter()
        while self._left:
            ready = self._wait(lambda: next((each for each in self._left if not each[0] & self._missing), None))
            self._left.remove(ready)
            # What is too short to sleep, or slept too long, is made up for by what follows.
            free_s = max(free_s, time.perf_counter() - 1e-3) + ready[1] / 1e6
            if (left_s := free_s - time.perf_counter()) > 0:
                time.sleep(left_s)
        self._wait(lambda: not self._missing)

    def _wait(self, condition: Any) -> Any:
        with self._changed:
            found = self._changed.wait_for(lambda: self._failure or condition(), TIMEOUT_S)
        if self._failure is not None:
            raise self._failure
        return found


def _name(index: int, is_planned: bool) -> str:
    return f"{'planned' if is_planned else 'free'}:{index}"


def _is_planned(step: int) -> bool:
    return step % 2 == 0
