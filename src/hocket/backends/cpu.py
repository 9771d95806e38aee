"""Lanes of CPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hocket.backends.base import Backend
from hocket.execution import executor
from hocket.execution.lanes import Executor
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning import planners
from hocket.profiling.tracer import costs_of, default_widths, one_lane
from hocket.tracing.captured import Captured

__all__ = ["CpuBackend"]


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
        return one_lane(captured, torch.get_num_threads(), self.machine)

    def executor(self, captured: Captured, plan: Plan) -> Executor:
        return executor(captured, plan, self.machine, kind=self.kind)

    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        widths = default_widths(self.machine.cores)
        return [(str(w), self.executor(captured, one_lane(captured, w, self.machine))) for w in widths]

    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        return costs_of(measured)

    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        if planner != "auto":
            return [(planner, {})]
        found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name, maker in planners().items() if maker.automatic]
        # One narrow lane: no simulation sees what threads cost each other, so it is always compared.
        return [*found, ("serial", {"width": 1})]

    def synchronize(self) -> None:
        """No-op: on cores a step is over when its call returns."""

    def release(self, executor: Executor) -> None:
        # Where teams have more threads than there are cores, those of libgomp hardly spin: eager would look slow beside
        # other lanes. And what all contenders keep in memory would add up.
        executor.close()
