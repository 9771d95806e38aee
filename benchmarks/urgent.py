"""A small value that becomes urgent while a large one is on its way, over a link of a given rate.

In turns: the large value alone as one message of gloo, with the small one sent right behind it; and over a wire, in
chunks of which four are on their way, while small ones are sent now and then. The small one's delay is from its send to
its arrival, by the clock that both processes share; throughput is the large one's size over its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.bench import table_of
from benchmarks.namespaces import Namespace, linked, needs_namespaces
from benchmarks.ranks import join_job, results
from hocket.distributed.membership import connected
from hocket.distributed.packets import Packet, chunk_bytes_for
from hocket.distributed.store import meet_at, opened
from hocket.distributed.wire import Wire

LARGE_BYTES, SMALL_BYTES = 16 << 20, 1024
TIMEOUT_S = 60.0
PORT = 29573
NUM_SMALL, PAUSE_S = 5, 0.08
LARGE, SMALL, NEXT = "large", "small", "next"
TAGS = (1, 2)


def run(mbits: Sequence[int] = (200,), rounds: int = 5) -> dict[str, Any]:
    """Both ways in turns, over links of a given rate.

    Raises:
        InputError: there can be no network namespaces here, or a rank failed. Says why.
    """
    needs_namespaces("transfers over real links")
    rows = []
    for mbit in mbits:
        with linked(mbit) as ends:
            places = [(rank, end, ends[0].address, rounds, mbit) for rank, end in enumerate(ends)]
            sent, arrived = results(_rank, places, "benchmarks.urgent")
        found = {way: _summary(sent[way], arrived[way]) for way in ("wire", "gloo")}
        rows.append({"mbit_per_s": mbit, "rounds": rounds, **found})
    return {"rows": rows}


def _summary(sent: list[list[int]], arrived: list[list[int]]) -> dict[str, float]:
    """Summarise the clocks of each round: the large value's, then those of small ones."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(sent, arrived, strict=True)]
    large_s = median((there - here) / 1e9 for (here, there), *_ in pairs)
    delays_ms = sorted((there - here) / 1e6 for _, *small in pairs for here, there in small)
    return {
        "delay_ms": median(delays_ms),
        "longest_delay_ms": delays_ms[-1],
        "mbit_per_s": LARGE_BYTES * 8 / large_s / 1e6,
    }


def _rank(place: int, end: Namespace, address: str, rounds: int, mbit: int) -> dict[str, list[list[int]]]:
    join_job(place, 2, address, PORT, end)
    store = opened(address, PORT, TIMEOUT_S, is_keeper=place == 0)
    wire = connected(store, "wire", place, f"rank {place}", f"rank {1 - place}", TIMEOUT_S)
    group = ProcessGroupGloo(PrefixStore("gloo", store), place, 2, store.options(TIMEOUT_S))
    chunk_bytes = chunk_bytes_for(mbit * 1e6 / 8)
    large, small = [Packet((LARGE,), (LARGE_BYTES,), chunk_bytes)], [Packet((SMALL,), (SMALL_BYTES,))]
    said = [Packet((NEXT,), (8,))]
    wire.add(*((small, said) if place == 0 else (said, small)))
    wire.add(*((large, ()) if place == 0 else ((), large)), ordered=True)
    meet_at(store, "wire", place, f"rank {1 - place}", TIMEOUT_S)
    found: dict[str, list[list[int]]] = {"wire": [], "gloo": []}
    for number in range(1, rounds + 1):
        for way, moved in (("wire", _by_wire), ("gloo", _by_gloo)):
            found[way].append(moved(place, wire, group, number))
    meet_at(store, "over", place, f"rank {1 - place}", TIMEOUT_S)
    return found


def _by_wire(place: int, wire: Wire, _: Any, number: int) -> list[int]:
    """The clock at the begin of each send, or at each arrival."""
    memory = [torch.zeros(LARGE_BYTES, dtype=torch.uint8)]
    memory += [torch.zeros(SMALL_BYTES, dtype=torch.uint8) for _ in range(NUM_SMALL)]
    clocks = [0] * len(memory)
    over = threading.Semaphore(0)

    def done(which: int) -> Any:
        def stamp(error: BaseException | None) -> None:
            if place == 1 and error is None:
                clocks[which] = time.perf_counter_ns()
            over.release()

        return stamp

    if place == 1:
        for which, tensor in enumerate(memory):
            epoch = number if which == 0 else (number - 1) * NUM_SMALL + which
            wire.receive(LARGE if which == 0 else SMALL, tensor, epoch, done(which))
        wire.put(NEXT, torch.zeros(1, dtype=torch.int64))
    else:
        wire.get(NEXT, torch.zeros(1, dtype=torch.int64))
        clocks[0] = time.perf_counter_ns()
        wire.send(LARGE, memory[0], number, done(0))
        for which in range(1, len(memory)):
            time.sleep(PAUSE_S)
            clocks[which] = time.perf_counter_ns()
            wire.send(SMALL, memory[which], (number - 1) * NUM_SMALL + which, done(which))
    for _each in memory:
        over.acquire(timeout=TIMEOUT_S)
    return clocks


def _by_gloo(place: int, wire: Wire, group: Any, number: int) -> list[int]:
    memory = [torch.zeros(size, dtype=torch.uint8) for size in (LARGE_BYTES, SMALL_BYTES)]
    if place == 1:
        works = [group.recv([tensor], 0, tag) for tensor, tag in zip(memory, TAGS, strict=True)]
        wire.put(NEXT, torch.zeros(1, dtype=torch.int64))
        clocks = []
        for work in works:
            work.wait()
            clocks.append(time.perf_counter_ns())
        return clocks
    wire.get(NEXT, torch.zeros(1, dtype=torch.int64))
    begin_ns = time.perf_counter_ns()
    for work in [group.send([tensor], 1, tag) for tensor, tag in zip(memory, TAGS, strict=True)]:
        work.wait()
    return [begin_ns, begin_ns]


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [{"rate": row["mbit_per_s"], "way": way, **row[way]} for row in result["rows"] for way in ("wire", "gloo")]
    columns = {
        **{"Mbit/s": "{rate}", "way": "{way}", "delay ms, median": "{delay_ms:.1f}"},
        **{"longest": "{longest_delay_ms:.1f}", "Mbit/s of the large one": "{mbit_per_s:.1f}"},
    }
    yield table_of("1 KiB that becomes urgent behind 16 MiB", columns, rows)
