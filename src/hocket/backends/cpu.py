"""Lanes of CPU cores."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any

import torch

from hocket.backends.base import PROFILE_RUNS, ROUNDING, Backend
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.ir import Costs, Machine, Plan
from hocket.ir.placement import scattered
from hocket.planning import planners
from hocket.planning.base import cpu_devices
from hocket.profiling.exact_widths import ExactWidths
from hocket.profiling.hill_climb import FEW_CORES, RUNS, SCATTER, climbing
from hocket.profiling.tracer import costs_of, default_widths, serial_plan, steps_of
from hocket.tracing.captured import Captured


class CpuBackend(Backend):
    """Lanes of CPU cores. With `bitwise` ops run only at widths at which they give eager's bits."""

    def __init__(self, machine: Machine, kind: str, *, bitwise: bool = False) -> None:
        self.machine = machine
        self.kind = kind
        self.exact_widths = ExactWidths(torch.get_num_threads()) if bitwise else None
        self.tolerance = 0.0 if bitwise else ROUNDING
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

    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        if self.machine.cores <= FEW_CORES:
            exact, timelines = self._exact(captured, self._widths), {}
            for width in self._widths:
                lanes = self.executor(captured, serial_plan(captured, width, self.machine, exact))
                timelines[width] = yield from steps_of(lanes, PROFILE_RUNS, warm_up=1)
            return self._listed(captured, costs_of(timelines), self._widths)
        measured: set[int] = set()
        climb = climbing(captured.graph.ops, cpu_devices(self.machine)[0])
        try:
            setting = next(climb)
            while True:
                measured.add(setting.width)
                plan = serial_plan(captured, setting.width, self.machine, self._exact(captured, measured))
                plan = scattered(plan, self.machine) if setting.affinity == SCATTER else plan
                setting = climb.send((yield from steps_of(self.executor(captured, plan), RUNS)))
        except StopIteration as end:
            costs: Costs = end.value
        if self.exact_widths is not None and (usual := self.exact_widths.usual_width) not in measured:
            lanes = self.executor(captured, serial_plan(captured, usual, self.machine))
            costs = costs.merged(costs_of({usual: (yield from steps_of(lanes, RUNS))}))
        return self._listed(captured, costs, measured)

    def distrust_widths(self) -> bool:
        trusted = self.exact_widths is not None and self.exact_widths.is_trusted
        if self.exact_widths is not None:
            self.exact_widths.is_trusted = False
        return trusted

    @property
    def _widths(self) -> tuple[int, ...]:
        """Numbers of threads at which ops are profiled on few cores."""
        usual = () if self.exact_widths is None else (self.exact_widths.usual_width,)
        return tuple(sorted({*default_widths(self.machine.cores), *usual}))

    def _exact(self, captured: Captured, widths: Iterable[int]) -> Mapping[str, Collection[int]] | None:
        """For each op the widths that it may have, None for any."""
        return None if self.exact_widths is None else self.exact_widths.of(captured, widths)

    def _listed(self, captured: Captured, costs: Costs, widths: Iterable[int]) -> Costs:
        """These costs without widths that an op may not have: there it was timed at another one."""
        exact = self._exact(captured, widths)
        return costs if exact is None else costs.at_widths(exact)

    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        if planner != "auto":
            return [(planner, {})]
        found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name, maker in planners().items() if maker.automatic]
        if any(device.smt > 1 for device in cpu_devices(self.machine)):
            # The gain of sibling threads is a published figure, not a measured one: the paper's plan with them is one
            # more candidate.
            found.append(("concurrency", {"lookahead_ms": 0.0, "halves": True}))
        # One narrow lane: no simulation sees what threads cost each other.
        return [*found, ("serial", {"width": 1})]

    def synchronize(self) -> None:
        """No-op: on cores a step is over when its call returns."""
