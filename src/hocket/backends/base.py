"""What a tuner has to know about a device, and nothing above a backend says which device it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

from hocket.execution.base import Executor
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.planning import Bounds, bounds
from hocket.simulation import simulate
from hocket.tracing.captured import Captured

__all__ = ["PROFILE_RUNS", "ROUNDING", "Backend"]

# Real training steps spent on a profile: timed runs at each key, after one that is not counted.
PROFILE_RUNS = 3
# What another number of threads does to sums in single precision, relative to the largest value of a tensor, with room
# for a few steps to carry it on. A wrong rate or a lost gradient is orders of magnitude beyond it.
ROUNDING = 1e-4


class Backend(ABC):
    """A device: its machine and label, executors, profiling, planners, synchronisation, bounds.

    Attributes:
        machine: what plans are made for.
        label: what it is called in a report, such as ``2 CPU cores``.
        notes: what a report has to say about times on it.
        tolerance: how far a planned step may be from eager's, relative to the largest value of a tensor. 0: every bit
            is eager's.
    """

    machine: Machine
    label: str
    notes: tuple[str, ...] = ()
    tolerance: float = ROUNDING

    @property
    def num_cores(self) -> int:
        """Cores of its CPUs, or multiprocessors of its GPU."""
        return sum(device.cores for device in self.machine.devices)

    @property
    def splits(self) -> bool:
        """Whether a joint backward may be worth taking apart."""
        return True

    def distrust_widths(self) -> bool:
        """Run every op at eager's width from now on. False where they do, or where rounding may differ."""
        return False

    def eager(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's own step as it goes on this device."""
        return step

    @abstractmethod
    def serial_plan(self, captured: Captured) -> Plan:
        """The ops in eager's order on one lane."""

    @abstractmethod
    def executor(self, captured: Captured, plan: Plan) -> Executor:
        """What runs `plan`."""

    @abstractmethod
    def profilers(self, captured: Captured) -> Sequence[tuple[str, Executor]]:
        """What to time the ops with: the key of their costs, and an executor that makes timelines."""

    @abstractmethod
    def costs(self, captured: Captured, measured: dict[str, list[Timeline]]) -> Costs:
        """The costs that these timelines, by key, say."""

    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        """Measure how long ops take: yields what makes the next step, and goes on when it has been made."""
        measured: dict[str, list[Timeline]] = {}
        for key, executor in self.profilers(captured):
            for run in range(PROFILE_RUNS + 1):
                yield executor
                if run:
                    measured.setdefault(key, []).append(executor.timeline())
            executor.close()
        return self.costs(captured, measured)

    @abstractmethod
    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        """Planners and their options, for what a schedule was asked for.

        Raises:
            InputError: this planner makes plans for other devices.
        """

    def predict(self, captured: Captured, plan: Plan, costs: Costs) -> Timeline:
        """The simulated timeline of a step by `plan`, as its executor launches the ops."""
        return simulate(captured.graph, plan, costs, self.machine)

    def bounds(self, graph: Graph, costs: Costs) -> Bounds:
        """Between which times any plan of `graph` lies."""
        return bounds(graph, costs, self.machine)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until what has been launched is done."""

    @abstractmethod
    def release(self, executor: Executor) -> None:
        """After a turn of this executor, let others have the device as if they were alone."""
