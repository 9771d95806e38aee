"""What a transfer between two ranks of a job takes, measured."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from hocket.distributed.pipelines.first_rank import made_by_first_rank
from hocket.ir import Link

__all__ = ["measured_link"]

PINGS = 20
PING_BYTES = 4 << 20


def measured_link() -> Link:
    """Latency and bandwidth between the first two ranks of the job, by messages there and back; the same on all ranks.

    All pairs of neighbours send at once, as in a pipeline; on one machine they share its cores. Every rank has to call
    it. In a job of one rank the link is as fast as can be said.
    """
    able = dist.get_rank() ^ 1 < dist.get_world_size()
    short_us, long_us = (_one_way_us(size) if able else 0.0 for size in (1, PING_BYTES))
    latency_us, sending_us = made_by_first_rank(lambda: [short_us, max(long_us - short_us, 1.0)])
    return Link("rank0", "rank1", PING_BYTES / sending_us * 1e6, latency_us)


def _one_way_us(size: int) -> float:
    value, found = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(PINGS):
        begin_s = perf_counter()
        for sender in (0, 1):
            if dist.get_rank() % 2 == sender:
                dist.send(value, dist.get_rank() ^ 1)
            else:
                dist.recv(value, dist.get_rank() ^ 1)
        found.append((perf_counter() - begin_s) / 2 * 1e6)
    return median(found)
