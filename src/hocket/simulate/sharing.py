"""What ops cost each other that run on different hardware threads of one core.

A plan may put one lane on the first threads of some cores and another on their siblings (`hocket.ir.Lane.cores`). The
model is as simple as what is known: while k threads of a core are busy, together they get done `Device.smt_speedup`
times what one of them does alone, each an equal part; and an op is as slow as the slowest of its threads, since it is
done only when they all are. With Liu et al.'s 1.03 two ops on all cores, side by side, each run at 0.515 of their
speed, and end 1.03 times sooner than one after the other, as in their Table III.
"""

from __future__ import annotations

from collections import Counter

from hocket.ir import Machine, Plan

__all__ = ["Sharing", "sharing_of"]


class Sharing:
    """Who runs where, and how fast.

    Args:
        places: for each lane that can share a core the device and cores of its threads, one for each thread.
        speedup: `Device.smt_speedup` by device.
    """

    def __init__(self, places: dict[int, list[tuple[str, int]]], speedup: dict[str, float]) -> None:
        self._places = places
        self._speedup = speedup
        self._busy: Counter[tuple[str, int]] = Counter()
        self._running: dict[int, int] = {}  # op by lane

    def __contains__(self, lane: int) -> bool:
        return lane in self._places

    def begin(self, lane: int, op: int, now_us: float) -> None:
        self._busy.update(self._places[lane])
        self._running[lane] = op

    def end(self, lane: int) -> None:
        self._busy.subtract(self._places[lane])
        del self._running[lane]

    def rates(self) -> dict[int, float]:
        """For each op that runs on such a lane its speed; 1.0 is that of running alone."""
        return {op: min(map(self._rate, self._places[lane])) for lane, op in self._running.items()}

    def _rate(self, place: tuple[str, int]) -> float:
        busy = self._busy[place]
        return 1.0 if busy <= 1 else self._speedup[place[0]] / busy


def sharing_of(plan: Plan, machine: Machine) -> Sharing | None:
    """The lanes of devices on which some lane names sibling threads; None where no lane does."""
    devices = {
        lane.device
        for lane in plan.lanes
        if lane.kind == "cores" and lane.cores and lane.ops and _names_siblings(lane.device, lane.cores, machine)
    }
    if not devices:
        return None
    places = {
        number: [(lane.device, core % machine.by_name[lane.device].cores) for core in lane.cores]
        for number, lane in enumerate(plan.lanes)
        if lane.kind == "cores" and lane.device in devices and lane.cores and lane.width == len(lane.cores)
    }
    return Sharing(places, {name: machine.by_name[name].smt_speedup for name in devices})


def _names_siblings(name: str, cores: tuple[int, ...], machine: Machine) -> bool:
    device = machine.by_name.get(name)
    return device is not None and max(cores) >= device.cores
