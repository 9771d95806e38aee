"""`hocket.schedule`: the one place that joins capture, profile, plan, check and execute.

A schedule is called like the step. It tells calls apart by what a graph would be good for (the shapes of the batch, the
modes of the modules), and each such signature goes through a life of its own (see `hocket.life`) and is remembered.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hocket.adapt import CoRun, DriftLimits
from hocket.capture.captured import Captured, signature_of
from hocket.capture.state import inventory
from hocket.errors import ExecutionError, InputError, StaleCaptureError
from hocket.execute import EXECUTORS, foreign
from hocket.ir import Costs, Graph, Machine, Plan, Span, Timeline
from hocket.life import Candidate, Life, Setting, Verdict
from hocket.plan import Bounds, bounds, efficiency, planners
from hocket.report import Comparison, Sample, write_report
from hocket.verify import Difference

__all__ = ["Candidate", "Schedule", "Verdict", "schedule"]

log = logging.getLogger("hocket")

# A step whose shapes never settle would be captured for ever.
MAX_CAPTURES = 8

# Pairs of ops that a report names, of those that ran side by side and gained most.
REPORTED_PAIRS = 5


class Schedule:
    """A training step that finds its own plan; call it as you would call the step. See `schedule`.

    Beyond the arguments of `schedule`:

    Args:
        clock: counts seconds; every decision rests on it.
        drift: when a step time has drifted from its verdict, and how often that may be acted on.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: Any,
        optimizer: Any,
        *,
        planner: str = "auto",
        guard: bool = True,
        strict: bool = False,
        machine: Machine | None = None,
        executor: str = "auto",
        clock: Callable[[], float] = perf_counter,
        drift: DriftLimits | None = None,
    ) -> None:
        if not callable(step):
            raise InputError(f"schedule: expected a step to call, got {type(step).__name__}")
        if planner != "auto" and planner not in planners():
            raise InputError(f"schedule: unknown planner {planner!r}; available: auto, {', '.join(planners())}")
        if executor not in EXECUTORS:
            raise InputError(f"schedule: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
        self.step = step
        self.machine = machine or Machine.here()
        for device in self.machine.devices:
            if problem := foreign(device):
                raise InputError(f"schedule: machine: {problem}")
        self._places = inventory(model, optimizer)
        self._versions = self._places.versions()
        limits = drift or DriftLimits()
        self._setting = Setting(
            step, model, optimizer, self._places, planner, guard, strict, self.machine, executor, clock, limits
        )
        self._lives: dict[Any, Life] = {}
        self._current = Life(self._setting)
        self._last: Any = None
        self._moved_on: set[Any] = set()
        self._captures = 0
        self._busy = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        """One training step.

        Raises:
            ExecutionError: the step is running already, in another thread or further up in this one.
            Exception: whatever the step raises, from a planned op with the op and its layer in a note.
        """
        if not self._busy.acquire(blocking=False):
            raise ExecutionError("this step is already running; give each thread a schedule of its own")
        try:
            return self._run(batch)
        finally:
            self._busy.release()

    def _run(self, batch: Any) -> Any:
        if self._places.versions() != self._versions:
            self._look_around()
        key = signature_of(self._places, batch)
        life = self._lives.get(key)
        last, self._last = self._last, key
        if life is None and key in self._moved_on and key != last:
            # It was followed by another kind last time (there are no gradients yet, as after a step that failed): that
            # is not worth a capture, unless it comes again at once.
            return self.step(batch)
        life = self._current = life or self._new_life(key)
        try:
            return self._live(life, key, batch)
        except StaleCaptureError:
            # A number that the step branches on has crossed its threshold: this graph is of the past.
            self._forget(life)
            life = self._current = self._new_life(key)
            return self._live(life, key, batch)

    def _look_around(self) -> None:
        """Models were dropped, refilled or frozen: every tensor may be another one, and no graph stands any more."""
        self.close()
        self._lives.clear()
        self._moved_on.clear()
        self._places = inventory(self._setting.model, self._setting.optimizer)
        self._versions = self._places.versions()
        self._setting = replace(self._setting, places=self._places)

    def _live(self, life: Life, key: Any, batch: Any) -> Any:
        first = life.captured is None and not life.settled
        try:
            result = life(batch)
        except BaseException:
            # The step itself failed, or was interrupted; if that was on the way to a verdict, begin anew next time.
            if not life.settled:
                self._forget(life)
            raise
        if first:
            self._captures += 1
            if life.captured is not None:
                # The first step may have left gradients where there were none; the next call finds what was captured.
                if life.captured.signature != key:
                    self._moved_on.add(key)
                    self._lives.pop(key, None)
                self._lives[life.captured.signature] = life
        return result

    def _new_life(self, key: Any) -> Life:
        often = f"the step was captured {MAX_CAPTURES} times and its shapes or modes still change"
        life = self._lives[key] = Life(
            self._setting,
            refused=often if self._captures >= MAX_CAPTURES else "",
            capture_first=key in self._moved_on,
        )
        return life

    def _forget(self, life: Life) -> None:
        self._lives = {key: other for key, other in self._lives.items() if other is not life}
        life.close()

    @property
    def verdict(self) -> Verdict:
        """``"planned"`` or ``"eager"`` for the batches of the last call's shape; ``.why`` tells the reason."""
        return self._current.standing.verdict

    @property
    def why(self) -> str:
        """The reason for the verdict."""
        return self.verdict.why

    @property
    def history(self) -> tuple[Verdict, ...]:
        """Every verdict for the last call's shape, the first one first: more than one where the step time drifted."""
        return self._current.history

    @property
    def decided(self) -> bool:
        """Whether the verdict for the last call's shape stands; not while the step is profiled and tried (again)."""
        return self._current.settled

    @property
    def candidate(self) -> Candidate | None:
        """The plan that is run, or would be the best one to run; None before there is a verdict."""
        return self._current.standing.candidate

    @property
    def captured(self) -> Captured:
        return self._found().captured

    @property
    def graph(self) -> Graph:
        return self._found().captured.graph

    @property
    def costs(self) -> Costs:
        return self._found().costs

    @property
    def plan(self) -> Plan:
        return self._found().plan

    @property
    def co_runs(self) -> tuple[CoRun, ...]:
        """Pairs of ops that ran side by side in the contest, as measured; those that lost most by it first."""
        return self._current.standing.co_runs

    @property
    def bounds(self) -> Bounds:
        """Between which times any plan of this graph lies, by the measured costs."""
        found = self._found()
        return bounds(found.captured.graph, found.costs, self.machine)

    @property
    def difference(self) -> Difference | None:
        """What the verification found, once it was made."""
        return self._current.difference

    def timeline(self) -> Timeline:
        """When each op of the last planned step ran."""
        return self._found().executor.timeline()

    def comparison(self, target: str = "step") -> Comparison:
        """Eager and planned side by side, from the steps of the contest."""
        found, eager_ms = self._found(), self._current.standing.eager_ms
        if not eager_ms or not found.steps_ms:
            raise InputError("no contest has been run yet: it follows the profiling steps, and needs guard=True")
        return compare(target, self, eager_ms, found.steps_ms, self.difference)

    def report(self, directory: str | os.PathLike[str]) -> Mapping[str, Path]:
        """Write the page, the trace, the drawing and all files behind them into `directory`."""
        found = self._found()
        limits = self.bounds
        contested = bool(self._current.standing.eager_ms and found.steps_ms)
        return write_report(
            Path(directory),
            title="Hocket report",
            graph=found.captured.graph,
            plan=found.plan,
            costs=found.costs,
            timelines={"planned": found.executor.timeline(), "simulated": found.predicted},
            comparison=self.comparison() if contested else None,
            lower_us=limits.lower_us,
            upper_us=limits.upper_us,
            notes=self.notes,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report adds in words: earlier verdicts, and how pairs of ops fared side by side."""
        lines = [f"before that: {verdict}, because {verdict.why}" for verdict in self.history[-2::-1]]
        bad = [pair for pair in self.co_runs if pair.interfered]
        good = [pair for pair in reversed(self.co_runs) if pair.faster_together][:REPORTED_PAIRS]
        for words, pairs in (("faster side by side", good), ("interfered", bad[:REPORTED_PAIRS])):
            lines += [
                f"{words}: {pair.first} and {pair.second}, together for {pair.overlap_us:.0f} us that take "
                f"{pair.in_turn_us:.0f} us in turn"
                for pair in pairs
            ]
        if len(bad) > REPORTED_PAIRS:
            lines.append(f"interfered: {len(bad) - REPORTED_PAIRS} further pairs")
        return tuple(lines)

    def close(self) -> None:
        """End the lanes' threads."""
        for life in self._lives.values():
            life.close()

    def _found(self) -> Candidate:
        found = self.candidate
        if found is None:
            raise InputError(f"there is no plan: {self.why}")
        return found


def schedule(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    *,
    planner: str = "auto",
    guard: bool = True,
    strict: bool = False,
    machine: Machine | None = None,
    executor: str = "auto",
) -> Schedule:
    """Make a training step use everything the machine has, without changing what it computes.

    Args:
        step: ``step(batch) -> loss``, the user's own, unchanged. It must do its work in tensors: what it prints or
            appends to Python lists happens only while it runs eagerly.
        model: the module it trains, or a list of modules.
        optimizer: the optimizer it steps, or a list of optimizers.
        planner: ``auto`` tries every planner; or one of `hocket.plan.planners`.
        guard: measure the plan against eager and keep the faster; without it the plan runs in any case.
        strict: raise `CaptureError` where a step cannot be captured, instead of staying eager.
        machine: what to run on; `Machine.here()` when not given.
        executor: ``native`` lanes, ``python`` threads, or ``auto``: native where they can be built.

    Returns:
        A `Schedule`, called like the step. The first calls (about 40 to 60, twice as many where fused models may go by
        rules or one by one) are ordinary training steps that capture, verify, profile and try; ``verdict`` then says
        what runs and why. When the step time later drifts, the step is profiled and tried again; ``history`` has all
        verdicts.

    Example:
        >>> fast = hocket.schedule(step, model, optimizer)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = fast(batch)
        >>> fast.verdict  # doctest: +SKIP
        'planned', because plan 'list' on 2 lane(s) takes 0.91x of eager's time (lower quartiles of 9 steps each, ...)
    """
    _advise()
    return Schedule(
        step, model, optimizer, planner=planner, guard=guard, strict=strict, machine=machine, executor=executor
    )


@cache
def _advise() -> None:
    """Say once what has to be in the environment before torch is loaded, and is not."""
    if sys.platform.startswith("linux") and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        log.warning(
            "hocket: set GOMP_SPINCOUNT=10000 in the environment before torch is loaded, so that idle OpenMP threads "
            "do not spin for milliseconds on cores that other lanes need"
        )


def compare(
    target: str, fast: Schedule, eager_ms: list[float], planned_ms: list[float], difference: Difference | None
) -> Comparison:
    """The comparison of a schedule's plan with eager, from times of interleaved steps."""
    eager, planned = Sample.of(eager_ms), Sample.of(planned_ms)
    limits = fast.bounds
    measured = Timeline((Span("step", "step", 0.0, planned.median * 1e3),), ("step",), "measured")
    return Comparison(
        target=target,
        device="cpu",
        cores=fast.machine.cores,
        ops=len(fast.graph),
        eager_ms=eager,
        planned_ms=planned,
        lower_bound_ms=limits.lower_us / 1e3,
        efficiency=efficiency(measured, limits),
        speedup=eager.median / planned.median,
        verdict=str(fast.verdict),
        why=fast.why,
        max_abs_diff=difference.max_abs_diff if difference else None,
        bitwise=difference is not None and difference.bitwise,
        planner=fast.plan.planner,
        versions={"torch": torch.__version__},
    )
