"""Streams of one GPU, whatever device they are on."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from hocket.backends.base import PROFILE_RUNS, Backend
from hocket.errors import InputError
from hocket.execution.base import Executor
from hocket.execution.streams import CudaDevice, GraphedLanes, StreamDevice, as_launched
from hocket.ir import Costs, Device, Lane, Machine, Plan, Timeline
from hocket.profiling.gpu import estimate_gpu
from hocket.profiling.tracer import costs_of, steps_of
from hocket.simulation import simulate
from hocket.tracing.captured import Captured

# GPUs whose rates come with Hocket; see `hocket.ir.Machine.preset`.
_KNOWN = ("p100", "v100", "a100", "h100", "h200")
# Single-precision lanes of a multiprocessor by compute capability (NVIDIA, CUDA C++ Programming Guide, "Arithmetic
# Instructions"); 128 for those that are not listed.
_LANES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


class StreamBackend(Backend):
    """Plans on the streams of one GPU, run as CUDA graphs.

    Where the GPU's rates are known, the part of it that each op fills is estimated.
    """

    def __init__(self, device: StreamDevice, machine: Machine, label: str) -> None:
        (self.gpu,) = machine.devices
        self.device = device
        self.machine = machine
        self.label = label

    def serial_plan(self, captured: Captured) -> Plan:
        return Plan((Lane(f"{self.gpu.name}.0", captured.graph.order, "stream", self.gpu.name),), planner="serial")

    def executor(self, captured: Captured, plan: Plan) -> Executor:
        return GraphedLanes(captured, plan, device=self.device)

    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        # By a graph that records events: launched one by one, short ops would be timed with the host's gaps in them. In
        # its first steps a graph does so, too; the shortest time of each op counts.
        lanes = GraphedLanes(captured, self.serial_plan(captured), device=self.device, timed=True)
        found = costs_of({self.gpu.name: (yield from steps_of(lanes, PROFILE_RUNS, warm_up=1))})
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


class CudaBackend(StreamBackend):
    """The streams of one CUDA device."""

    is_asynchronous = True

    def __init__(self, device: CudaDevice) -> None:
        found = torch.cuda.get_device_properties(device.index)
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
        gpu = replace(
            _published(found.name) or _by_properties(found),
            cores=found.multi_processor_count,
            memory_bytes=float(found.total_memory),
            priorities=least - greatest + 1,
        )
        super().__init__(device, Machine((gpu,), note=found.name), found.name)


def _published(name: str) -> Device | None:
    """Return the published rates of the GPU of this name, or None if Hocket does not have them."""
    words = name.lower().replace("-", " ").split()
    known = next((known for known in _KNOWN if known in words), None)
    return replace(Machine.preset(known).devices[0], name="gpu0") if known else None


def _by_properties(found: Any) -> Device:
    """Rates of a GPU by its clocks and widths, as the driver states them, and the launch costs of an A100.

    Without a clock of the memory (the driver of some cards states none) the ratio of an A100's rates stands for it.
    """
    known = Machine.preset("a100").devices[0]
    lanes = _LANES.get((found.major, found.minor), 128)
    clock_hz = getattr(found, "clock_rate", 0) * 1e3 or 1.5e9
    flops_per_s = 2.0 * lanes * found.multi_processor_count * clock_hz
    # Two transfers in each cycle of the memory's clock.
    bytes_per_s = 2.0 * getattr(found, "memory_clock_rate", 0) * 1e3 * getattr(found, "memory_bus_width", 0) / 8
    if not bytes_per_s:
        assert known.bytes_per_s is not None
        assert known.flops_per_s is not None
        bytes_per_s = flops_per_s * known.bytes_per_s / known.flops_per_s
    return replace(known, name="gpu0", flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
