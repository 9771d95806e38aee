"""The interface of a device for the tuner. No code above a backend depends on the kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

from hocket.execution.base import Executor
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.planning import Bounds, bounds
from hocket.simulation import simulate
from hocket.tracing.captured import Captured

# Real training steps spent on a profile: timed runs at each key, after one that is not counted.
PROFILE_RUNS = 3
# The effect of another number of threads on sums in single precision, relative to the largest value of a tensor, with a
# margin for its growth over a few steps. A wrong rate or a lost gradient is orders of magnitude beyond it.
ROUNDING = 1e-4


class Backend(ABC):
    """A device: its machine and label, executors, profiling, planners, synchronisation, bounds.

    Attributes:
        machine: the machine that plans are made for.
        label: its name in a report, such as ``2 CPU cores``.
        notes: lines about its times in a report.
        tolerance: the largest allowed difference of a planned step from eager's, relative to the largest value of a
            tensor. 0 requires eager's exact bits.
        is_asynchronous: a call returns before its ops are done, so that its duration says nothing about them.
    """

    machine: Machine
    label: str
    notes: tuple[str, ...] = ()
    tolerance: float = ROUNDING
    is_asynchronous = False

    @property
    def num_cores(self) -> int:
        """Cores of its CPUs, or multiprocessors of its GPU."""
        return sum(device.cores for device in self.machine.devices)

    @property
    def splits(self) -> bool:
        """True if splitting a joint backward may be worthwhile."""
        return True

    def distrust_widths(self) -> bool:
        """Run every op at eager's width from now on. Returns False if they do, or if rounding may differ."""
        return False

    def eager(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the user's step as it runs on this device."""
        return step

    @abstractmethod
    def serial_plan(self, captured: Captured) -> Plan:
        """Return the plan that runs the ops in eager's order on one lane."""

    @abstractmethod
    def executor(self, captured: Captured, plan: Plan) -> Executor:
        """Return the executor of `plan`."""

    @abstractmethod
    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        """Measure the ops: yield the executor of the next step, and continue when the step has been made."""

    @abstractmethod
    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the planners to try, with their options, for the `planner` of a schedule, which has to fit."""

    def predict(self, captured: Captured, plan: Plan, costs: Costs) -> Timeline:
        """Simulate the timeline of a step by `plan`, as its executor launches the ops."""
        return simulate(captured.graph, plan, costs, self.machine)

    def bounds(self, graph: Graph, costs: Costs) -> Bounds:
        """Return the bounds of all plans of `graph`."""
        return bounds(graph, costs, self.machine)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all launched work is done."""

    def took_ms(self, work: Callable[[Any], Any], batch: Any, clock: Callable[[], float]) -> float:
        """Run a step and return its milliseconds, with nothing under way at either end."""
        self.synchronize()
        start = clock()
        work(batch)
        self.synchronize()
        return (clock() - start) * 1e3

    def release(self, executor: Executor) -> None:
        """Free threads and memory after this executor has run, so that others are not slowed down by it.

        Where teams have more threads than there are cores, those of libgomp hardly spin: eager would look slow beside
        other lanes. And what all contenders keep in memory (on a GPU the pool of each graph) would add up.
        """
        executor.close()
