"""Values that a tuner works with: its options, its requests, and the candidate plans with the times of their steps.

A tuner never sees a batch or a result. A variant of a schedule carries out each request on the user's real step and
sends back an observation, see `Tuner.search`::

    tuner    WatchedStep  RecordedStep  VerifiedStep  SampledForms  TimedStep ...        Decision
               |   ^         |   ^         |   ^        |   ^         |   ^
    variant    step purity   step graph    two steps    distances     step milliseconds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from hocket.adaptation import DriftLimits
from hocket.autotune.store import DecisionStore
from hocket.backends import Backend
from hocket.execution.base import Executor
from hocket.execution.streams import CudaDevice
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning.critical_path.memory import lasting_bytes, serial_peak_bytes
from hocket.pystate.watch import PurityWatch
from hocket.reporting import lower_quartile
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry
from hocket.tracing.state import Inventory


@dataclass(frozen=True)
class TunerConfig:
    """Options of a schedule. See `hocket.schedule` and `hocket.session.Schedule`."""

    step: Callable[[Any], Any]
    model: Any
    optimizer: Any
    places: Inventory
    watch: PurityWatch
    machine: Machine
    store: DecisionStore
    planner: str = "auto"
    guard: bool = True
    strict: bool = False
    executor: str = "auto"
    clock: Callable[[], float] = perf_counter  # returns seconds, as `time.perf_counter` does. Every decision uses it.
    # limits beyond which a step time has drifted from its verdict, and how often a search may follow
    drift: DriftLimits = field(default_factory=DriftLimits)
    numerics: str = "bitwise"
    plan: Plan | None = None
    on_progress: Callable[[str, int], object] | None = None
    # makes the backend of one signature's plans, such as a `hocket.backends.SimulatedBackend`. By default that of the
    # parameters' device.
    backend: Callable[[], Backend] | None = None
    # the step is a function of its batch and writes nothing but tensors in it: a graph of AOTAutograd, of which no
    # Python is watched
    is_region: bool = False
    recalls: bool = True  # decisions that were remembered are used. Where the machine has changed since, they are not.
    is_tentative: bool = False  # where the step is refused, something else is tried, so that nothing is said yet
    # tensors that are neither the models' nor the optimizers' and get gradients in a step, by identity. They are found
    # by recording.
    leaves: dict[int, Entry] = field(default_factory=dict)
    gpus: dict[int, CudaDevice] = field(default_factory=dict)  # by index: all its plans run on the same streams of each


@dataclass(frozen=True, eq=False)
class Candidate:
    """One plan that may win."""

    form: str  # name of the step's form, see `hocket.tracing.variants`
    captured: Captured  # the step in that form
    costs: Costs  # durations of its ops
    plan: Plan
    predicted: Timeline  # simulated timeline of the plan
    executor: Executor  # runs the plan
    plain: Captured | None = None  # the step in the bitwise form, if `form` is not bitwise
    steps_ms: tuple[float, ...] = ()  # durations of its steps in the comparison, empty before that
    timelines: tuple[Timeline, ...] = ()  # measured timelines of these steps, if ops may run side by side

    @property
    def step_ms(self) -> float:
        """The median duration of its steps, or the predicted one before any was measured."""
        return median(self.steps_ms) if self.steps_ms else self.predicted.makespan_us / 1e3

    @property
    def rank_ms(self) -> float:
        """Sort key: the lower quartile of its steps, or the predicted duration before any was measured."""
        return lower_quartile(self.steps_ms) if self.steps_ms else self.predicted.makespan_us / 1e3

    @cached_property
    def kept_bytes(self) -> float:
        """The bytes that its lanes keep between two steps, about."""
        return serial_peak_bytes(self.captured.graph) - lasting_bytes(self.captured.graph)

    @property
    def co_runs(self) -> bool:
        """True if ops may run side by side."""
        return sum(bool(lane.ops) for lane in self.plan.lanes) > 1


@dataclass(frozen=True)
class WatchedStep:
    """An ordinary step, watched. Back comes what it showed, a `hocket.pystate.watch.Watched`."""

    stage: ClassVar[str] = "watch"


@dataclass(frozen=True)
class RecordedStep:
    """An ordinary step in this form, recorded. Back comes a `hocket.autotune.recording.RecordedForm`."""

    stage: ClassVar[str] = "capture"

    form: str


@dataclass(frozen=True, eq=False)
class VerifiedStep:
    """An ordinary step, and from the same state the same by `executor`. Back comes a `Difference`."""

    stage: ClassVar[str] = "verify"

    form: str
    executor: Executor


@dataclass(frozen=True, eq=False)
class SampledForms:
    """An ordinary step, after the same step in float64, by `plain` and by each of `forms`, all from the same state.

    The answer holds for each form a sample of its distances, or the error (see `hocket.autotune.closeness`).
    """

    stage: ClassVar[str] = "verify"

    captured: Captured
    plain: Executor
    forms: Mapping[str, Executor]
    number: int


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step by `executor` in this form, or an ordinary one. Back come its milliseconds."""

    executor: Executor | None = None
    stage: str = "compare"
    form: str = ""


Item = WatchedStep | RecordedStep | VerifiedStep | SampledForms | TimedStep
