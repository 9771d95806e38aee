r"""A GPU as a shared resource: how kernels on different streams slow each other down.

A kernel that runs alone on a GPU uses part of its multiprocessors and part of its memory's bandwidth (`Costs.shares`).
While several run, each is limited to the part that the ones before it leave::

    stream 0 (priority 1)   [==== asks for 0.6 ====][ 0.9 ]        goes first: rate 1
    stream 1 (priority 0)   [---- asks for 0.8, gets 0.4 -][ 0.8 ]    rate 0.4 / 0.8, later 0.1 / 0.8, then 1

Streams of higher priority are served first, and among equals the kernel that was ready first: a GPU assigns all blocks
of the first kernel, and the blocks of the next kernel get the remaining multiprocessors (Amert, Otterness, Yang,
Anderson, Smith: "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, section IV). A kernel's rate is
the remaining part over the part that it asks for, of multiprocessors or of bandwidth, whichever is smaller. So all
kernels together never exceed the device.

Two things are simplified: a kernel of higher priority gets its multiprocessors at once (on a GPU, when running blocks
end), and shares are averages over the duration of a kernel.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence

from hocket.ir import Costs, Graph, Machine, Plan, Share
from hocket.simulation.contention import RateSharing


class Multiprocessors(RateSharing):
    """The streams of a plan on the GPUs they share.

    Args:
        streams: the GPU and the priority of each lane that is a stream of such a GPU.
        shares: the share of each op, by position in the graph, None for ops that slow down no other op.
    """

    def __init__(self, streams: dict[int, tuple[str, int]], shares: Sequence[Share | None]) -> None:
        super().__init__()
        self._streams = streams
        self._shares = shares
        # By GPU: minus the priority, since when it is ready, and the op; the first in order is served first.
        self._queues: dict[str, list[tuple[int, float, int, int]]] = {device: [] for device, _ in streams.values()}

    def __contains__(self, lane: int) -> bool:
        return lane in self._streams

    def _admit(self, lane: int, op: int, now_us: float) -> None:
        device, priority = self._streams[lane]
        insort(self._queues[device], (-priority, now_us, lane, op))

    def _dismiss(self, ops: Collection[int]) -> None:
        for device, queue in self._queues.items():
            self._queues[device] = [entry for entry in queue if entry[3] not in ops]

    def _rates(self, now_us: float) -> dict[int, float]:
        found = {}
        for queue in self._queues.values():
            processors = bandwidth = 1.0
            for _, _, _, op in queue:
                share = self._shares[op]
                if share is None:
                    found[op] = 1.0
                    continue
                rate = min(1.0, processors / share.multiprocessors)
                if share.bandwidth:
                    rate = min(rate, bandwidth / share.bandwidth)
                if rate < _STANDSTILL:  # what rounding leaves over is nothing
                    rate = 0.0
                found[op] = rate
                processors = max(0.0, processors - rate * share.multiprocessors)
                bandwidth = max(0.0, bandwidth - rate * share.bandwidth)
        return found


_STANDSTILL = 1e-9


def multiprocessors_of(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> Multiprocessors | None:
    """The GPUs on which some op has a share, or None if there is no such op or only one stream."""
    streams: dict[int, tuple[str, int]] = {}
    shares: list[Share | None] = [None] * len(graph)
    if not costs.shares or sum(lane.kind == "stream" for lane in plan.lanes) < 2:
        return None
    index = graph.index
    for number, lane in enumerate(plan.lanes):
        if lane.kind == "stream" and lane.device in machine.by_name:
            streams[number] = (lane.device, lane.priority)
            for op in lane.ops:
                row = costs.shares.get(op)
                if row is not None:
                    shares[index[op]] = row.get(lane.device)
    return Multiprocessors(streams, shares) if any(shares) else None
