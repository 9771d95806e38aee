"""Lanes of CPU cores."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from hocket.backends.base import Backend
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning import planners
from hocket.planning.base import cpu_devices
from hocket.planning.moldable.placement import scattered
from hocket.profiling.climbing import climbing
from hocket.profiling.hill_climb import Setting
from hocket.profiling.tracer import costs_of, default_widths, serial_plan
from hocket.tracing.captured import Captured

__all__ = ["CpuBackend"]

# Up to so many cores every width that a plan may use is one of 1, 2, 4 and all: there is nothing to climb.
FEW_CORES = 4


class CpuBackend(Backend):
    """Lanes of CPU cores; `kind` is the executor that was asked for."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine = machine
        self.kind = kind
        self.label = f"{machine.cores} CPU core{'s' if machine.cores > 1 else ''}"

    @property
    def num_cores(self) -> int:
        return self.machine.cores

    @property
    def splits(self) -> bool:
        return self.machine.cores > 1

    def serial_plan(self, captured: Captured) -> Plan:
        return serial_plan(captured, torch.get_num_threads(), self.machine)

    def executor(self, captured: Captured, plan: Plan) -> Executor:
        return executor(captured, plan, self.machine, kind=self.kind)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        widths = default_widths(self.machine.cores)
        return [(str(w), self.executor(captured, serial_plan(captured, w, self.machine))) for w in widths]

    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        if self.machine.cores <= FEW_CORES:
            return (yield from super().profiled(captured))
        climb = climbing(captured.graph.ops, cpu_devices(self.machine)[0])
        lanes: Executor | None = None
        asked: Setting | None = None
        try:
            setting = next(climb)
            while True:
                if lanes is None or setting != asked:
                    if lanes is not None:
                        lanes.close()
                    plan = serial_plan(captured, setting.width, self.machine)
                    apart = setting.affinity == "scatter"
                    lanes, asked = self.executor(captured, scattered(plan, self.machine) if apart else plan), setting
                yield lanes
                setting = climb.send(lanes.timeline())
        except StopIteration as end:
            costs: Costs = end.value
            return costs
        finally:
            if lanes is not None:
                lanes.close()

    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        return costs_of(measured)

    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        if planner != "auto":
            return [(planner, {})]
        found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name, maker in planners().items() if maker.automatic]
        if any(device.smt > 1 for device in cpu_devices(self.machine)):
            # What sibling threads are worth is a published figure, not a measured one: the paper's plan with them is
            # one more candidate.
            found.append(("concurrency", {"lookahead_ms": 0.0, "halves": True}))
        # One narrow lane: no simulation sees what threads cost each other.
        return [*found, ("serial", {"width": 1})]

    def synchronize(self) -> None:
        """No-op: on cores a step is over when its call returns."""

    def release(self, executor: Executor) -> None:
        # Where teams have more threads than there are cores, those of libgomp hardly spin: eager would look slow beside
        # other lanes. And what all contenders keep in memory would add up.
        executor.close()
