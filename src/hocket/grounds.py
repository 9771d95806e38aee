"""What a step stands on: the cores of this machine, or one GPU's streams.

A life asks its ground four things: which plan runs the step as it is, with which plans to profile it, which planners
to try, and how to know that a step is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.capture.captured import Captured
from hocket.execute import executor
from hocket.execute.lanes import Executor
from hocket.ir import Costs, Device, Lane, Machine, Plan, Timeline
from hocket.plan import planners
from hocket.profile.gpu import estimate_gpu
from hocket.profile.tracer import costs_of, default_widths, one_lane

__all__ = ["Cores", "Ground", "Streams"]


# GPUs whose rates come with Hocket; see `hocket.ir.Machine.known`.
_KNOWN = ("p100", "v100", "a100", "h200")


class Ground(ABC):
    """See the module."""

    machine: Machine

    @abstractmethod
    def plain(self, captured: Captured) -> Plan:
        """The ops in eager's order on one lane."""

    @abstractmethod
    def lanes(self, captured: Captured, plan: Plan) -> Executor:
        """What runs `plan`."""

    @abstractmethod
    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        """What to time the ops with: the key of their costs, and an executor that makes timelines."""

    @abstractmethod
    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        """The costs that these timelines, by key, say."""

    @abstractmethod
    def tried(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        """Planners and their options, for what a schedule was asked for."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until what has been launched is done."""

    @abstractmethod
    def rest(self, lanes: Executor) -> None:
        """After a turn of these lanes, let others have the device as if they were alone."""

    @property
    def splits(self) -> bool:
        """Whether a joint backward may be worth taking apart."""
        return True


class Cores(Ground):
    """Lanes of CPU cores; `kind` is the executor that was asked for."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine = machine
        self.kind = kind

    def plain(self, captured: Captured) -> Plan:
        return one_lane(captured, torch.get_num_threads(), self.machine)

    def lanes(self, captured: Captured, plan: Plan) -> Executor:
        return executor(captured, plan, self.machine, kind=self.kind)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        widths = default_widths(self.machine.cores)
        return [(str(w), self.lanes(captured, one_lane(captured, w, self.machine))) for w in widths]

    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        return costs_of(measured)

    def tried(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        if planner != "auto":
            return [(planner, {})]
        found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name, maker in planners().items() if maker.automatic]
        # One narrow lane: no simulation sees what threads cost each other, so it is always in the contest.
        return [*found, ("serial", {"width": 1})]

    def settle(self) -> None:
        """Nothing: on cores a step is over when its call returns."""

    def rest(self, lanes: Executor) -> None:
        # Where teams have more threads than there are cores, those of libgomp hardly spin: eager would look slow beside
        # other lanes. And what all contenders keep in memory would add up.
        lanes.close()

    @property
    def splits(self) -> bool:
        return self.machine.cores > 1


class Streams(Ground):
    """The streams of one CUDA device.

    Args:
        index: of the device.

    Raises:
        ExecutionError: there is no such device.
    """

    def __init__(self, index: int) -> None:
        from hocket.execute.streams import Cuda

        self.backend = Cuda(index)
        found = torch.cuda.get_device_properties(index)
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
        device = Device(
            "gpu0",
            "cuda",
            found.multi_processor_count,
            memory_bytes=float(found.total_memory),
            priorities=least - greatest + 1,
        )
        self.machine = Machine((*Machine.here().devices, device), note=found.name)
        words = found.name.lower().replace("-", " ").split()
        self._rates = next((Machine.known(name) for name in _KNOWN if name in words), None)

    def plain(self, captured: Captured) -> Plan:
        return Plan((Lane("gpu0.0", captured.graph.order, "stream", "gpu0"),), planner="serial")

    def lanes(self, captured: Captured, plan: Plan) -> Executor:
        from hocket.execute.streams import GraphedLanes

        return GraphedLanes(captured, plan, self.machine, backend=self.backend)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        from hocket.execute.streams import StreamLanes

        return [("gpu0", StreamLanes(captured, self.plain(captured), backend=self.backend, timed=True))]

    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        found = costs_of(measured)
        if self._rates is None:
            return found
        # Durations are measured; which part of the GPU an op fills can only be estimated.
        return replace(found, shares=estimate_gpu(captured.graph, self._rates).shares)

    def tried(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        # One stream stands for itself: as a CUDA graph it is the baseline that other plans have to beat.
        return [("critical-path", {"methods": ()}), ("critical-path" if planner == "auto" else planner, {})]

    def settle(self) -> None:
        self.backend.synchronize()

    def rest(self, lanes: Executor) -> None:
        """Nothing: streams that have no work cost nobody anything."""
