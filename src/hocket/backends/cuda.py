"""Streams of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.backends.base import Backend
from hocket.execution.base import Executor
from hocket.ir import Costs, Device, Lane, Machine, Plan, Timeline
from hocket.profiling.gpu import estimate_gpu
from hocket.profiling.tracer import costs_of
from hocket.tracing.captured import Captured

__all__ = ["CudaBackend"]

# GPUs whose rates come with Hocket; see `hocket.ir.Machine.known`.
_KNOWN = ("p100", "v100", "a100", "h200")


class CudaBackend(Backend):
    """The streams of one CUDA device.

    Args:
        index: of the device.

    Raises:
        ExecutionError: there is no such device.
    """

    def __init__(self, index: int) -> None:
        from hocket.execution.streams import CudaDevice

        self.backend = CudaDevice(index)
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
        from hocket.execution.streams import GraphedLanes

        return GraphedLanes(captured, plan, self.machine, device=self.backend)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        from hocket.execution.streams import StreamLanes

        return [("gpu0", StreamLanes(captured, self.plain(captured), device=self.backend, timed=True))]

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
