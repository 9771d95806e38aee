"""Slowdown of ops that run on different hardware threads of one core.

A plan may put one lane on the first threads of some cores and another on their siblings (`hocket.ir.Lane.cores`). The
model is simple: each thread of an op does an equal part of its work, and the op ends when all of them have, as in a
parallel loop with static division. While k threads of a core are busy, their total throughput is `Device.smt_speedup`
times that of one alone, in equal parts::

    core 0, thread 0  |======= wide =======|. . .|      a wide op on two cores, and beside it two small ones on the
            thread 1  |                    .     .      sibling thread of core 1: until these are done, both get on
    core 1, thread 0  |=== wide ===--------======|      at about half their speed (-), and the wide op ends when its
            thread 1  | small || small |              part on core 1 does

With Liu et al.'s 1.03 two ops on all cores, side by side, each run at 0.515 of their speed, and end 1.03 times sooner
than one after the other, as in their Table III.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hocket.ir import Machine, Plan, names_threads


class Sharing:
    """Contention of lanes that share cores.

    `places` has the cores of the threads of each lane that can share a core, and `speedup` the `Device.smt_speedup`
    of each core.
    """

    def __init__(self, places: Mapping[int, Sequence[int]], speedup: Sequence[float]) -> None:
        self._places = {lane: np.array(cores) for lane, cores in places.items()}
        self._speedup = np.array(speedup)
        self._busy = np.zeros(len(speedup), np.int64)  # threads of each core
        self._running: dict[int, _RunningOp] = {}
        self.next_us = float("inf")  # the time of the next change if no op begins before, infinity while no op runs

    def __contains__(self, lane: int) -> bool:
        return lane in self._places

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        """Begin an op, which alone would take `work_us`, on an idle lane."""
        touched = self._pass(self._running.values(), now_us)
        places = self._places[lane]
        np.add.at(self._busy, places, 1)
        self._running[op] = _RunningOp(places, work_us, now_us)
        self._adapt({*touched, *places.tolist()}, now_us)

    def ended(self, now_us: float) -> list[tuple[int, float]]:
        """Remove the ops that have ended by `now_us`, and return them with their starts."""
        touched = self._pass(self._running.values(), now_us)
        found = [(op, running.began_us) for op, running in self._running.items() if not running.active.any()]
        for op, _ in found:
            del self._running[op]
        self._adapt(touched, now_us)
        return found

    def _pass(self, running: Iterable[_RunningOp], now_us: float) -> set[int]:
        """Free all threads that are done by now, and return their cores."""
        touched: set[int] = set()
        for one in running:
            if one.first_us <= now_us:
                done = one.active & (one.end_us <= now_us)
                if done.any():
                    one.active &= ~done
                    np.subtract.at(self._busy, one.places[done], 1)
                    touched.update(one.places[done].tolist())
        return touched

    def _adapt(self, touched: set[int], now_us: float) -> None:
        """Compute the speeds of all ops with a thread on one of these cores again."""
        for one in self._running.values():
            if not touched.isdisjoint(one.cores):
                busy = np.maximum(self._busy[one.places], 1)
                one.go_on(np.where(busy == 1, 1.0, self._speedup[one.places] / busy), now_us)
        self.next_us = min((one.next_us for one in self._running.values()), default=float("inf"))


class _RunningOp:
    """An op that runs, thread by thread."""

    def __init__(self, places: npt.NDArray[np.int64], work_us: float, now_us: float) -> None:
        self.places = places  # the core of each thread
        self.began_us = now_us
        self.cores = frozenset(places.tolist())
        self.active = np.ones(len(places), bool)  # True for each thread that is not done
        self.end_us = np.empty(len(places))  # the end of each thread at its present speed
        # The end of the first active thread, and the next time that matters: the end of a thread that shares its core,
        # or of the last one.
        self.first_us = self.next_us = float("inf")
        self._left_us = np.full(len(places), work_us)
        self._speed = np.ones(len(places))
        self._since_us = now_us

    def go_on(self, speed: npt.NDArray[np.float64], now_us: float) -> None:
        """Run the threads at these speeds from now on."""
        self._left_us = np.maximum(0.0, self._left_us - (now_us - self._since_us) * self._speed)
        changed = self.active & ((speed != self._speed) | (self._since_us == now_us))
        self.end_us[changed] = now_us + self._left_us[changed] / speed[changed]
        self._speed, self._since_us = speed, now_us
        ends = self.end_us[self.active]
        self.first_us = float(ends.min(initial=float("inf")))
        shared = self.end_us[self.active & (speed != 1.0)]
        self.next_us = min(float(ends.max(initial=now_us)), float(shared.min(initial=float("inf"))))


def sharing_of(plan: Plan, machine: Machine) -> Sharing | None:
    """The lanes of devices on which some lane names sibling threads, or None if no lane does."""
    devices = {
        lane.device
        for lane in plan.lanes
        if lane.kind == "cores"
        and lane.ops
        and lane.device in machine.by_name
        and names_threads(lane, machine.by_name[lane.device])
    }
    if not devices:
        return None
    first: dict[str, int] = {}
    speedup: list[float] = []
    for name in sorted(devices):
        first[name] = len(speedup)
        speedup += [machine.by_name[name].smt_speedup] * machine.by_name[name].cores
    places = {
        number: [first[lane.device] + core % machine.by_name[lane.device].cores for core in lane.cores]
        for number, lane in enumerate(plan.lanes)
        if lane.kind == "cores" and lane.device in devices and lane.cores and lane.width == len(lane.cores)
    }
    return Sharing(places, speedup)
