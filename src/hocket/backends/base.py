"""What a tuner has to know about a device, and nothing above a backend says which device it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

from hocket.execution.base import Executor
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.tracing.captured import Captured

__all__ = ["PROFILE_RUNS", "Backend"]

# Real training steps spent on a profile: timed runs at each key, after one that is not counted.
PROFILE_RUNS = 3


class Backend(ABC):
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
