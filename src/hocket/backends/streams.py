"""Streams of one GPU, whatever device they are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hocket.backends.base import Backend
from hocket.errors import InputError
from hocket.execution.base import Executor
from hocket.execution.streams import GraphedLanes, StreamDevice, as_launched
from hocket.ir import Costs, Lane, Machine, Plan, Timeline
from hocket.profiling.gpu import estimate_gpu
from hocket.profiling.tracer import costs_of
from hocket.simulation import simulate
from hocket.tracing.captured import Captured


class StreamBackend(Backend):
    """Plans on the streams of one GPU, run as CUDA graphs.

    Args:
        device: makes the streams.
        machine: the GPU, its only device. Where its rates are known, the part of it that each op fills is estimated.
        label: what a report calls it.
    """

    def __init__(self, device: StreamDevice, machine: Machine, label: str) -> None:
        (self.gpu,) = machine.devices
        self.device = device
        self.machine = machine
        self.label = label

    def serial_plan(self, captured: Captured) -> Plan:
        return Plan((Lane(f"{self.gpu.name}.0", captured.graph.order, "stream", self.gpu.name),), planner="serial")

    def executor(self, captured: Captured, plan: Plan) -> Executor:
        return GraphedLanes(captured, plan, self.machine, device=self.device)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        # By a graph that records events: launched one by one, short ops would be timed with the host's gaps in them. In
        # its first steps a graph does so, too; the shortest time of each op counts.
        lanes = GraphedLanes(captured, self.serial_plan(captured), device=self.device, timed=True)
        return [(self.gpu.name, lanes)]

    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        found = costs_of(measured)
        if self.gpu.flops_per_s is None or self.gpu.bytes_per_s is None:
            return found
        # Durations are measured; which part of the GPU an op fills can only be estimated.
        return replace(found, shares=estimate_gpu(captured.graph, self.machine, device=self.gpu.name).shares)

    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        # One stream stands for itself: as a CUDA graph it is the baseline that other plans have to beat.
        one_stream: tuple[str, dict[str, Any]] = ("critical-path", {"methods": ()})
        if planner == "serial":
            return [one_stream]
        if planner not in ("auto", "critical-path"):
            raise InputError(
                f"planner {planner!r} makes plans for CPU cores, and the step is on a GPU; expected auto, "
                "critical-path or serial"
            )
        return [one_stream, ("critical-path", {})]

    def predict(self, captured: Captured, plan: Plan, costs: Costs) -> Timeline:
        made, outside = as_launched(captured, plan, self.device)
        return simulate(captured.graph, made, costs, self.machine, launches="graph", outside=outside)

    def synchronize(self) -> None:
        self.device.synchronize()
