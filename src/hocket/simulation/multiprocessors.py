r"""A GPU as a shared resource: what kernels on different streams do to each other.

A kernel that runs alone on a GPU takes part of its multiprocessors and part of its memory's bandwidth (`Costs.shares`);
the rest lies idle. While several run, each gets on at the rate that is left for it::

    stream 0 (priority 1)   [==== asks for 0.6 ====][ 0.9 ]        goes first: rate 1
    stream 1 (priority 0)   [---- asks for 0.8, gets 0.4 -][ 0.8 ]    rate 0.4 / 0.8, later 0.1 / 0.8, then 1

Streams of higher priority are served first, and among equals whoever was ready first: a GPU hands out the blocks of the
kernel that came first until there are none left, and the next kernel's blocks get what that leaves over (Amert,
Otterness, Yang, Anderson, Smith: "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, section IV).
The rate is the smaller of what is left of multiprocessors and of bandwidth, over what the kernel asks for, so
together they never do more than the device can.

What is simplified: a kernel of higher priority gets its multiprocessors at once (on a GPU, as soon as blocks that run
there end, which takes as long as a block does); and shares are averages over a kernel, not its course.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence

from hocket.ir import Costs, Graph, Machine, Plan, Share
from hocket.simulation.contention import RateSharing


class Multiprocessors(RateSharing):
    """The streams of a plan on the GPUs they share.

    Args:
        streams: for each lane that is a stream of such a GPU: the GPU and the stream's priority.
        shares: for each op by position in the graph what it asks for on its lane; None: nothing that others miss.
    """

    def __init__(self, streams: dict[int, tuple[str, int]], shares: Sequence[Share | None]) -> None:
        super().__init__()
        self._streams = streams
        self._shares = shares
        # By GPU: minus the priority, since when it is ready, and the op; whoever is served first stands first.
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
    """The GPUs on which some op has a share; None where there is no such op, or never two at once."""
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
