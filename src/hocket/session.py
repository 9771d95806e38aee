"""`hocket.schedule`: the one place that joins capture, profile, plan, check and execute.

A scheduled step goes through a short life, in which every call is a real training step of the user's::

    call 1          eager; then the step is captured (and that is undone)
    call 2          verified: eager, and once more by plan from the same state
    calls 3 ...     profiled: the captured step op by op, at each width
    next calls      tried: eager and the best plans in turn
    ever after      whatever was fastest, plan or eager

A new shape of batch (or another mode of a module) goes through its own life, and is remembered.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hocket.capture.captured import Captured, capture_step, relowered, signature_of
from hocket.capture.state import inventory
from hocket.check import check
from hocket.errors import CaptureError, InputError, StaleCaptureError
from hocket.execute import EXECUTORS, executor
from hocket.execute.lanes import Executor
from hocket.ir import Costs, Graph, Machine, Plan, Span, Timeline
from hocket.plan import Bounds, bounds, efficiency, plan, planners
from hocket.profile.tracer import costs_of, default_widths, one_lane
from hocket.report import Comparison, Sample, write_report
from hocket.simulate import simulate
from hocket.verify import Difference, verify

__all__ = ["Candidate", "Schedule", "Verdict", "schedule"]

log = logging.getLogger("hocket")

# Real training steps spent before the verdict: timed runs at each width, and rounds of the contest.
PROFILE_RUNS = 3
TRIAL_ROUNDS = 5
# Candidates that come to the contest by their prediction; serial plans always do.
CONTENDERS = 3
# A step whose shapes never settle would be captured for ever.
MAX_CAPTURES = 8


class Verdict(str):
    """``"planned"`` or ``"eager"``; `why` says on what grounds."""

    why: str

    def __new__(cls, choice: str, why: str) -> Verdict:
        verdict = super().__new__(cls, choice)
        verdict.why = why
        return verdict

    def __repr__(self) -> str:
        return f"{str(self)!r}, because {self.why}"


@dataclass
class Candidate:
    """One plan that may win: what it runs on, what was predicted of it, and how long its steps took."""

    captured: Captured
    costs: Costs
    plan: Plan
    predicted: Timeline
    executor: Executor
    steps_ms: list[float] = field(default_factory=list)


@dataclass
class _Route:
    """What is known for one signature; `life` is the generator that gets it from eager to its verdict."""

    life: Generator[Any, Any, None] | None = None
    candidates: list[Candidate] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    difference: Difference | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("eager", "not decided yet"))
    settled: bool = False
    best: Candidate | None = None


class Schedule:
    """A training step that finds its own plan; call it as you would call the step. See `schedule`."""

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
    ) -> None:
        if not callable(step):
            raise InputError(f"schedule: expected a step to call, got {type(step).__name__}")
        if planner != "auto" and planner not in planners():
            raise InputError(f"schedule: unknown planner {planner!r}; available: auto, {', '.join(planners())}")
        if executor not in EXECUTORS:
            raise InputError(f"schedule: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
        self.step = step
        self.model = model
        self.optimizer = optimizer
        self.planner = planner
        self.guard = guard
        self.strict = strict
        self.machine = machine or Machine.here()
        self.executor = executor
        self._places = inventory(model, optimizer)
        self._routes: dict[Any, _Route] = {}
        self._current = _Route()
        self._captures = 0

    def __call__(self, batch: Any) -> Any:
        key = signature_of(self._places, batch)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route()
        self._current = route
        if route.settled and route.best is None:
            return self.step(batch)
        try:
            if route.best is not None:
                return route.best.executor(batch)
            if route.life is not None:
                return route.life.send(batch)
        except StaleCaptureError:
            # A number that the step branches on has crossed its threshold: this graph is of the past.
            route = self._current = self._routes[key] = _Route()
        except BaseException:
            # The step itself failed, or was interrupted; if that was on the way to a verdict, begin anew next time.
            if not route.settled:
                self._forget(route)
            raise
        route.life = self._life(route, batch)
        return next(route.life)

    @property
    def verdict(self) -> Verdict:
        """``"planned"`` or ``"eager"`` for the batches of the last call's shape; ``.why`` tells the reason."""
        return self._current.verdict

    @property
    def why(self) -> str:
        """The reason for the verdict."""
        return self._current.verdict.why

    @property
    def decided(self) -> bool:
        """Whether the verdict for the last call's shape stands."""
        return self._current.settled

    @property
    def candidate(self) -> Candidate | None:
        """The plan that is run, or would be the best one to run; None before there is any."""
        route = self._current
        return route.best or min(route.candidates, key=_rank, default=None)

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
        found, route = self._found(), self._current
        if not route.eager_ms or not found.steps_ms:
            raise InputError("no contest has been run yet: it follows the profiling steps, and needs guard=True")
        return compare(target, self, route.eager_ms, found.steps_ms, route.difference)

    def report(self, directory: str | os.PathLike[str]) -> Mapping[str, Path]:
        """Write the page, the trace, the drawing and all files behind them into `directory`."""
        found, route = self._found(), self._current
        limits = self.bounds
        timelines = {"planned": found.executor.timeline(), "simulated": found.predicted}
        contested = bool(route.eager_ms and found.steps_ms)
        return write_report(
            Path(directory),
            title="Hocket report",
            graph=found.captured.graph,
            plan=found.plan,
            costs=found.costs,
            timelines=timelines,
            comparison=self.comparison() if contested else None,
            lower_us=limits.lower_us,
            upper_us=limits.upper_us,
        )

    def close(self) -> None:
        """End the lanes' threads."""
        for route in self._routes.values():
            for candidate in route.candidates:
                candidate.executor.close()

    def _found(self) -> Candidate:
        found = self.candidate
        if found is None:
            raise InputError(f"there is no plan: {self._current.verdict.why}")
        return found

    def _forget(self, route: _Route) -> None:
        self._routes = {key: other for key, other in self._routes.items() if other is not route}

    def _life(self, route: _Route, batch: Any) -> Generator[Any, Any, None]:
        result = self.step(batch)
        captured = self._capture(route, batch)
        if captured is None:
            yield result
            return
        # The first step may have left gradients where there were none; the next call finds what was captured.
        self._forget(route)
        self._routes[captured.signature] = route
        batch = yield result
        if not captured.holds():
            raise StaleCaptureError("captured at a threshold")
        plain = self._lanes(captured, one_lane(captured, torch.get_num_threads(), self.machine))
        route.difference, (result,) = verify(captured, plain, [batch])
        plain.close()
        if not route.difference.equal:
            d = route.difference
            self._settle(route, None, f"the captured step differs from eager by {d.max_abs_diff:.3g} in {d.where}")
            yield result
            return
        batch = yield result
        batch = yield from self._profiled(route, captured, batch)
        if self.guard:
            yield from self._contest(route, batch)
        else:
            best = min(route.candidates, key=_rank)
            self._settle(route, best, "guard=False: the plan runs whatever it costs")
            yield best.executor(batch)

    def _capture(self, route: _Route, batch: Any) -> Captured | None:
        self._captures += 1
        devices = {entry.get().device.type for entry in self._places.parameters} - {"cpu"}
        if devices:
            reason = f"its parameters are on {', '.join(sorted(devices))}; this version plans steps on CPUs"
        elif self._captures > MAX_CAPTURES:
            reason = f"the step was captured {MAX_CAPTURES} times and its shapes or modes still change"
        else:
            try:
                return capture_step(self.step, self.model, self.optimizer, batch, split=False)
            except CaptureError as error:
                if self.strict:
                    raise
                reason = f"it could not be captured: {error}"
        log.warning("hocket: the step stays eager: %s", reason)
        self._settle(route, None, reason)
        return None

    def _profiled(self, route: _Route, captured: Captured, batch: Any) -> Generator[Any, Any, Any]:
        """Profile with real steps, at every width, joint and split; then make the candidates."""
        for variant in self._variants(captured):
            measured: dict[int, list[Timeline]] = {}
            for width in default_widths(self.machine.cores):
                lanes = self._lanes(variant, one_lane(variant, width, self.machine))
                for run in range(PROFILE_RUNS + 1):
                    result = lanes(batch)
                    if run:
                        measured.setdefault(width, []).append(lanes.timeline())
                    batch = yield result
                lanes.close()
            self._propose(route, variant, costs_of(measured))
        return batch

    def _variants(self, captured: Captured) -> list[Captured]:
        if self.machine.cores == 1 or self.planner == "serial":
            return [captured]
        taken_apart = relowered(captured, split=True)
        return [captured, taken_apart] if len(taken_apart.graph) > len(captured.graph) else [captured]

    def _propose(self, route: _Route, captured: Captured, costs: Costs) -> None:
        automatic = [name for name, maker in planners().items() if maker.automatic]
        names = automatic if self.planner == "auto" else [self.planner]
        tried: list[tuple[str, dict[str, int]]] = [(name, {}) for name in names]
        if self.planner == "auto":
            # One narrow lane: no simulation sees what threads cost each other, so it is always in the contest.
            tried.append(("serial", {"width": 1}))
        for name, options in tried:
            made = plan(captured.graph, costs, self.machine, planner=name, **options)
            if any(_same_lanes(made, other.plan) for other in route.candidates if other.captured is captured):
                continue
            check(captured.graph, made, self.machine)
            predicted = simulate(captured.graph, made, costs, self.machine)
            lanes = self._lanes(captured, made)
            route.candidates.append(Candidate(captured, costs, made, predicted, lanes))

    def _lanes(self, captured: Captured, made: Plan) -> Executor:
        return executor(captured, made, self.machine, kind=self.executor)

    def _contest(self, route: _Route, batch: Any) -> Generator[Any, Any, None]:
        """Eager and every candidate in turn, on real steps; the fastest median wins."""
        ranked = sorted(route.candidates, key=lambda c: c.predicted.makespan_us)
        route.candidates = [c for n, c in enumerate(ranked) if n < CONTENDERS or c.plan.planner == "serial"]
        rounds = [None, *route.candidates]
        for number in range(TRIAL_ROUNDS + 1):
            for contender in rounds:
                start = perf_counter()
                result = self.step(batch) if contender is None else contender.executor(batch)
                took_ms = (perf_counter() - start) * 1e3
                if number:
                    (route.eager_ms if contender is None else contender.steps_ms).append(took_ms)
                last = number == TRIAL_ROUNDS and contender is rounds[-1]
                if last:
                    self._decide(route)
                batch = yield result

    def _decide(self, route: _Route) -> None:
        best = min(route.candidates, key=_rank)
        ratio = _rank(best) / median(route.eager_ms)
        what = f"plan {best.plan.planner!r} on {len(best.plan.lanes)} lane(s) takes {ratio:.2f}x of eager's time"
        what += f" (medians of {TRIAL_ROUNDS} interleaved steps)"
        self._settle(route, best if ratio < 1 else None, what)

    def _settle(self, route: _Route, best: Candidate | None, why: str) -> None:
        route.settled = True
        route.life = None
        route.best = best
        route.verdict = Verdict("planned" if best else "eager", why)
        for candidate in route.candidates:
            if candidate is not best and best is not None:
                candidate.executor.close()


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
        A `Schedule`, called like the step. The first calls (about 40) are ordinary training steps that capture,
        verify, profile and try; ``verdict`` then says what runs and why.

    Example:
        >>> fast = hocket.schedule(step, model, optimizer)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = fast(batch)
        >>> fast.verdict  # doctest: +SKIP
        'planned', because plan 'list' on 2 lane(s) takes 0.91x of eager's time (medians of 5 interleaved steps)
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


def _rank(candidate: Candidate) -> float:
    return median(candidate.steps_ms) if candidate.steps_ms else candidate.predicted.makespan_us / 1e3


def _same_lanes(first: Plan, second: Plan) -> bool:
    return [(lane.ops, lane.width) for lane in first.lanes] == [(lane.ops, lane.width) for lane in second.lanes]
