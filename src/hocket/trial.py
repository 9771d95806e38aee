"""The main job of `hocket run`: plan a training step, run the plan beside eager, and compare both.

Everything is measured in one process, interleaved, on steps that train. Results are compared over five steps from one
state.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hocket.autotune.candidate import Candidate
from hocket.autotune.verification import verify
from hocket.backends import Backend, CpuBackend, SimulatedBackend, SimulatedClock
from hocket.errors import HocketError
from hocket.execution.base import Executor
from hocket.ir import Machine, Plan, Timeline
from hocket.job import Job
from hocket.profiling.eager import EagerRecord, record_eager
from hocket.pystate.step_parts import is_end
from hocket.reporting import Comparison, Gain, Report, gains_of, lower_quartile, write_report
from hocket.reporting.words import duration_text
from hocket.session import Schedule, schedule
from hocket.summary import attempts_of, comparison_of
from hocket.tracing.captured import Captured
from hocket.tracing.variants import in_form

VERIFIED_STEPS = 5

# A rough count of the steps before the verdict, for a progress bar: profiling and comparisons.
EXPECTED_STEPS = 60

# Steps of a job, and seconds, after which regions of it are not waited for.
MAX_SEARCHED, MAX_SEARCHED_S = 2000, 60.0

# Where shapes hardly ever repeat, the search for one that fits comes to an end.
MAX_PASSED_OVER = 1000


@dataclass(frozen=True)
class Trial:
    """The result of `try_out`: the comparison, and the data of its report."""

    comparison: Comparison
    fast: Schedule
    timelines: dict[str, Timeline]
    gains: tuple[Gain, ...] = ()
    eager: EagerRecord | None = None

    def report(self, directory: str | os.PathLike[str]) -> dict[str, Path]:
        """Write the page, the trace and the files behind them.

        Raises:
            HocketError: no plan was made.
        """
        candidate = self.fast.candidate
        if candidate is None:
            raise HocketError(f"there is nothing to report, the step was not planned: {self.comparison.why}")
        return write_report(
            directory,
            Report(
                title=f"Hocket: {self.comparison.target}",
                graph=candidate.captured.graph,
                plan=candidate.plan,
                costs=candidate.costs,
                timelines=self.timelines,
                comparison=self.comparison,
                upper_us=self.fast.bounds.upper_us,
                baseline_plan=self.fast.backend.serial_plan(candidate.captured),
                notes=self.fast.notes,
                gains=self.gains,
                attempts=attempts_of(self.fast.decision),
                captions={} if self.eager is None else {"eager": _caption(self.eager)},
                further_ops=()
                if self.eager is None
                else (*(candidate.plain or candidate.captured).graph.ops, *self.eager.ops),
            ),
        )


def try_out(
    job: Job,
    *,
    planner: str = "auto",
    plan: Plan | None = None,
    numerics: str = "bitwise",
    cache: bool = True,
    runs: int = 10,
    strict: bool = False,
    simulated: Machine | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Trial:
    """Run the main job on `job`, with a planner, a plan, numerics and a cache as of `hocket.schedule`.

    `runs` interleaved steps of each kind are measured after the verdict. Under `strict` a step that cannot be captured
    raises. `simulated` has a GPU whose times are simulated (`hocket.backends.SimulatedBackend`), which need a plan, or
    it is a `HocketError`. `progress` is called with what is done, how much of it, and of how much, after every step.
    """
    options: dict[str, Any] = {"planner": planner, "plan": plan, "numerics": numerics, "strict": strict}
    clock: Callable[[], float] = perf_counter
    if simulated is None:
        fast = schedule(job.step, job.model, job.optimizer, cache=cache, **options)
    else:
        clock = simulated_clock = SimulatedClock()
        backend_of = partial(SimulatedBackend, simulated, simulated_clock)
        fast = Schedule(job.step, job.model, job.optimizer, clock=clock, backend=backend_of, **options)
    number, end_s = 0, perf_counter() + MAX_SEARCHED_S
    while not fast.decided or (number < MAX_SEARCHED and perf_counter() < end_s and fast.search_regions()):
        fast(job.batch(number))
        number += 1
        progress("capture, profile and try plans", min(number, EXPECTED_STEPS - 1), EXPECTED_STEPS)
    candidate, backend = fast.candidate, fast.backend
    if candidate is None and simulated is not None:
        raise HocketError(f"there is nothing to simulate, the step was not planned: {fast.why}")
    parts = fast.parts if candidate else None
    eager = backend.eager(job.step if parts is None else parts.alone)
    planned: Callable[[Any], Any] = candidate.executor if candidate else fast
    following = _batches(job, number, candidate.captured if candidate else None, eager, parts)
    eager_ms: list[float] = []
    planned_ms: list[float] = []
    for done in range(runs):
        for times, work in ((eager_ms, eager), (planned_ms, planned)):
            times.append(backend.took_ms(work, next(following), clock))
        progress("measure eager and planned in turn", done + 1, runs)
    if candidate is None:
        return Trial(_unplanned(job, fast, eager_ms, planned_ms), fast, {})
    batches = list(itertools.islice(following, VERIFIED_STEPS))
    width = max((lane.width for lane in candidate.plan.lanes if lane.kind == "cores"), default=None)
    if not backend.tolerance:
        width = torch.get_num_threads()
    with in_form(candidate.captured.trace.places, candidate.form):
        found, _ = verify(candidate.captured, planned, batches, width=width, tolerance=backend.tolerance)
    comparison = comparison_of(job.name or "step", fast.decision, backend, found, eager_ms, planned_ms)
    at_width = f" at {width} thread(s)" if width else ""
    notes = [f"compared with eager{at_width} over {found.steps} steps: parameters, buffers, state, loss"]
    if candidate.plain is not None:
        notes.append(
            f"form {candidate.form!r}: in one step no farther from the step in float64 than four times what eager is"
        )
    if width and width != torch.get_num_threads():
        with in_form(candidate.captured.trace.places, candidate.form):
            other, _ = verify(candidate.captured, planned, batches)
        notes.append(
            f"against eager at {torch.get_num_threads()} threads the largest difference is {other.max_abs_diff:.3g} "
            f"({other.relative:.1g} relative): what another number of threads does to sums"
        )
    steps = _Steps(backend, eager, following, runs, clock)
    timelines, gains, record = steps.analysis(candidate, comparison)
    saved = [f"{gain.name} {'about ' if gain.is_estimate else ''}{-gain.saved_ms:+.2f} ms" for gain in gains]
    notes.append(f"from eager to planned: {'; '.join(saved)}")
    if record is not None:
        notes.append(
            "the timelines are those of the fastest steps; eager's was recorded under torch's profiler "
            f"({duration_text(record.recorded_us)}), scaled to the time of a step without it"
        )
    return Trial(replace(comparison, notes=(*comparison.notes, *notes)), fast, timelines, gains, record)


@dataclass(frozen=True)
class _Steps:
    """Steps that are timed and drawn, each after one of eager's. All of them train."""

    backend: Backend
    eager: Callable[[Any], Any]
    batches: Iterator[Any]
    runs: int
    clock: Callable[[], float]

    def analysis(
        self, candidate: Candidate, comparison: Comparison
    ) -> tuple[dict[str, Timeline], tuple[Gain, ...], EagerRecord | None]:
        """Return the timelines of an eager step, a serial one, a planned one and the prediction, and the gains."""
        record = None
        reference = candidate.plain or candidate.captured
        step_us, cores = comparison.eager_ms.lower_quartile * 1e3, self.backend.num_cores
        if isinstance(self.backend, CpuBackend):
            record = record_eager(self.eager, self.batches, reference.graph, cores=cores, step_us=step_us)
        serial_ms, serial = self._serial(reference)
        in_form_ms = None
        if candidate.plain is not None:
            in_form_ms, serial = self._serial(candidate.captured)
        gains = gains_of(
            eager_ms=comparison.eager_ms.lower_quartile,
            planned_ms=comparison.planned_ms.lower_quartile,
            serial_ms=serial_ms,
            in_form_ms=in_form_ms,
            shares=None if record is None else {row: record.share(row) for row in record.timeline.lanes},
        )
        found = {} if record is None else {"eager": record.timeline}
        _, planned = self._timed(candidate.executor)
        return {**found, "serial": serial, "planned": planned, "simulated": candidate.predicted}, gains, record

    def _serial(self, captured: Captured) -> tuple[float, Timeline]:
        """Run a step's ops one after another. Returns as `_timed`."""
        serial = self.backend.executor(captured, self.backend.serial_plan(captured))
        timed = self._timed(serial)
        serial.close()
        return timed

    def _timed(self, executor: Executor) -> tuple[float, Timeline]:
        """Return the lower quartile in milliseconds of a few steps, and the timeline of the fastest.

        Each step follows one of eager's, which leaves caches and threads as the planned steps found them.
        """
        steps: list[tuple[float, Timeline]] = []
        for _ in range(1 + self.runs):
            self.eager(next(self.batches))
            took_ms = self.backend.took_ms(executor, next(self.batches), self.clock)
            steps.append((took_ms, executor.timeline()))
        del steps[0]
        fastest = min((timeline for _, timeline in steps), key=lambda timeline: timeline.makespan_us)
        return lower_quartile([time_ms for time_ms, _ in steps]), fastest


def _caption(record: EagerRecord) -> str:
    rows = ", ".join(f"{row} {record.share(row):.0%}" for row in record.timeline.lanes)
    others = "" if record.others_busy is None else f"; other cores busy {record.others_busy:.0%} at most"
    return f"{duration_text(record.timeline.makespan_us)} measured: {rows}{others}"


def _batches(
    job: Job, number: int, captured: Captured | None, eager: Callable[[Any], Any], parts: Any
) -> Iterator[Any]:
    """Yield the batches from `number` on that fit the plan, if there is one.

    Of a divided step these are the batches of its middle, for which its first part runs. The last batch of an epoch may
    be shorter than the others and is passed over. A step that takes another branch (by a count, for instance) runs
    eagerly.
    """
    passed_over = 0
    for position in itertools.count(number):
        batch = job.batch(position)
        if parts is not None:
            batch, kept = parts.begin(batch)
            if is_end(kept):
                continue
        if captured is None or (captured.fits(batch) and captured.holds(batch)):
            passed_over = 0
            yield batch
        elif (passed_over := passed_over + 1) == MAX_PASSED_OVER:
            raise HocketError(f"{MAX_PASSED_OVER} batches in a row are unlike the one that the step was captured with")
        elif captured.fits(batch):
            eager(batch)


def _unplanned(job: Job, fast: Schedule, eager_ms: list[float], planned_ms: list[float]) -> Comparison:
    is_eager = fast.verdict == "eager"
    note = "the row of planned steps is that of steps with regions: their results are not compared once more"
    if is_eager:
        eager_ms = planned_ms = [*eager_ms, *planned_ms]
        note = "no plan was made: both rows are the same eager steps"
    found = comparison_of(job.name or "step", fast.decision, fast.backend, None, eager_ms, planned_ms)
    difference = 0.0 if is_eager else None
    return replace(found, max_abs_diff=difference, bitwise=is_eager, notes=(note,), speedup_interval=None)
