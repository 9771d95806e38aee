"""The measured duration of a transfer between two ranks of a job."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from hocket.distributed.pipelines.first_rank import made_by_first_rank
from hocket.ir import Link

PINGS = 20
PING_BYTES = 4 << 20
# As many messages as a pipeline has on their way; together they are larger than a core's cache.
PLACES = 8


def measured_link() -> Link:
    """Latency and bandwidth between the first two ranks of the job, by messages both ways at once, for all ranks.

    In a pipeline an activation and a gradient cross a border at the same time. As there, what is sent has just been
    made, and each of the last few messages has memory of its own. The other ranks wait meanwhile: with all pairs at it
    all the time, four ranks on two cores looked slower than they are in a pipeline, which computes in between. Every
    rank has to call it. In a job of one rank the link is as fast as can be said.
    """
    able = dist.get_rank() < 2 <= dist.get_world_size()
    short_us, long_us = _one_way_us(1, PING_BYTES) if able else (0.0, 0.0)
    latency_us, sending_us = made_by_first_rank(lambda: [short_us, max(long_us - short_us, 1.0)])
    return Link("rank0", "rank1", PING_BYTES / sending_us * 1e6, latency_us)


def _one_way_us(*sizes: int) -> tuple[float, ...]:
    """The median for messages of each size, in turns."""
    peer = 1 - dist.get_rank()
    places = {size: [torch.zeros(size, dtype=torch.uint8) for _ in range(PLACES)] for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(PINGS):
        for size in sizes:
            sent, received = torch.ones(size, dtype=torch.uint8), places[size][number % PLACES]
            begin_s = perf_counter()
            both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            found[size].append((perf_counter() - begin_s) * 1e6)
    return tuple(median(found[size]) for size in sizes)
