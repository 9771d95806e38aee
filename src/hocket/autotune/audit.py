"""Audits compare a planned step with eager after the decision, first often and then rarely (`hocket.autotune.upkeep`).

A verified plan may become wrong later: by a branch that no watched step took, or by state that no guard can see, such
as that of a C extension. An audited step runs as the user's own Python and, from the same state, by the plan. Eager's
results are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hocket.autotune.candidate import Candidate
from hocket.autotune.closeness import MAX_SAMPLES, Closeness, sample
from hocket.autotune.runner import InexactError, RefusedError
from hocket.autotune.upkeep import Upkeep
from hocket.autotune.verification import Difference, verify
from hocket.backends import ROUNDING, Backend
from hocket.errors import CaptureError, StaleCaptureError
from hocket.heap import trim_heap
from hocket.ir import Plan
from hocket.tracing.captured import Captured
from hocket.tracing.raising import is_other_branch
from hocket.tracing.variants import in_form

log = logging.getLogger(__name__)

START_STEPS = 25
MAX_SHARE = 0.0025


class Auditor:
    """Audits the plan of one variant."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.audit = Upkeep(START_STEPS, MAX_SHARE)
        self._backend = backend
        self._clock = clock
        self._tolerance = backend.tolerance
        self._seen = Closeness(audited=True)  # of the audits that are not answered yet
        self._doubted: Plan | None = None  # differed by what may be rounding; asked again on narrow lanes

    def step(self, best: Candidate, batch: Any, eager: Callable[[Any], Any]) -> tuple[Any, RefusedError | None]:
        """Run one step by eager and by plan from the same state.

        Returns eager's result, and an error that describes the difference or None.

        Where every bit has to be eager's, that is an `InexactError` if nothing differs by more than rounding.
        """
        _expect_standing(best.captured, batch)
        start = self._clock()
        if best.plain is not None:
            return self._close_step(best, best.plain, batch, eager, start)
        made, executor = best.plan, best.executor
        if self._doubted is not None:
            made = self._doubted
            executor = self._backend.executor(best.captured, made)
        try:
            with in_form(best.captured.trace.places, best.form):
                found, result = audited(best.captured, made, executor, batch, eager, tolerance=self._tolerance)
        except CaptureError as error:
            return self._put_off(error, best, eager(batch), start)
        finally:
            if executor is not best.executor:
                executor.close()
        widths = {lane.width for lane in made.lanes if lane.ops}
        if not found.equal and not found.error and self._tolerance and len(widths) > 1:
            self._doubted = narrowed(made)
            self.audit.due = self.audit.num_steps + 1
            return result, None
        self._doubted = None
        self.audit.ended(self._clock() - start, best.step_ms / 1e3)
        is_caught = bool(found.error) and executor.left_no_trace()  # by the user's step, which eager has made
        if found.equal or is_caught or is_other_branch((found.error,)):
            return result, None
        what = self._problem(found.error or f"{found.where} by {found.max_abs_diff:.3g}")
        return result, InexactError(what) if found.is_rounding else RefusedError(what)

    def _close_step(
        self, best: Candidate, plain: Captured, batch: Any, eager: Callable[[Any], Any], start: float
    ) -> tuple[Any, RefusedError | None]:
        """The same for a form that is not bitwise: is it as close to the float64 step as eager?

        A sample that could not be made (for want of memory, say) has compared nothing: it is put off.
        """
        _expect_standing(plain, batch)
        with in_form(plain.trace.places, best.form):
            try:
                found, result = sample(plain, eager, {best.form: best.executor}, batch)
            except CaptureError as error:
                return self._put_off(error, best, eager(batch), start)
        outcome = found[best.form]
        if is_other_branch((outcome,)):
            return result, None
        self._seen = seen = self._seen.and_sample(outcome)
        if not seen.holds and not seen.error and len(seen.samples) < MAX_SAMPLES:
            self.audit.due = self.audit.num_steps + 1
            return result, None
        self._seen = Closeness(audited=True)
        self.audit.ended(self._clock() - start, best.step_ms / 1e3)
        return result, None if seen.holds else RefusedError(self._problem(seen.why))

    def _put_off(self, error: CaptureError, best: Candidate, result: Any, start: float) -> tuple[Any, None]:
        log.info("hocket: an audit is put off: %s", error)
        self.audit.ended(self._clock() - start, best.step_ms / 1e3)
        return result, None

    def _problem(self, what: str) -> str:
        return (
            f"planned step {self.audit.num_steps} does not compute what eager computes ({what}); eager's result was "
            "kept. Earlier planned steps may have been wrong, too: look for state that the step reads or writes in a C "
            "extension, a thread or another process"
        )


def _expect_standing(captured: Captured, batch: Any) -> None:
    if not captured.holds(batch) and not captured.moved(batch):
        raise StaleCaptureError("captured for another branch of the step, or for state that is gone")


def audited(
    captured: Captured,
    plan: Plan,
    executor: Any,
    batch: Any,
    eager: Callable[[Any], Any],
    *,
    tolerance: float = ROUNDING,
) -> tuple[Difference, Any]:
    """One step by eager and by `executor` from the same state: their difference, and eager's result.

    Where rounding may differ, a plan whose lanes all have one width is compared with eager at that width, which is
    bitwise where the kernels are.
    """
    widths = {lane.width for lane in plan.lanes if lane.ops and lane.kind == "cores"}
    width = widths.pop() if tolerance and len(widths) == 1 else None
    found, (result,) = verify(captured, executor, [batch], width=width, eager=eager, tolerance=tolerance)
    trim_heap()  # of what the eager step and the comparison took: planned steps have memory of their own
    return found, result


def narrowed(plan: Plan) -> Plan:
    """The same order on the same lanes, one thread each: sums are then those of eager at one thread.

    Where lanes have several widths, rounding differs from eager's at any number of threads, and an optimizer may make
    much of little (Adam takes a full step for a gradient that is all rounding). This plan tells that from an error.
    """
    lanes = tuple(replace(lane, width=1, cores=lane.cores[:1]) if lane.kind == "cores" else lane for lane in plan.lanes)
    return replace(plan, lanes=lanes)
