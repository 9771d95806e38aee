"""Makes the step of one call as a tuner asks for it, and remembers whether it has been made.

Whatever fails on the way to a decision (a capture, a plan, an executor), the call still has to make its training step
exactly once, and an error of the user's own step has to reach him. So every step of a search goes through here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hocket.autotune.candidate import (
    Candidate,
    Item,
    RecordedStep,
    SampledForms,
    TimedStep,
    TunerConfig,
    VerifiedStep,
    WatchedStep,
)
from hocket.autotune.closeness import sample
from hocket.autotune.recording import recorded_form
from hocket.autotune.verification import Difference, verify
from hocket.backends import Backend
from hocket.errors import CaptureError, HocketError, StaleCaptureError
from hocket.execution.base import Executor
from hocket.heap import trim_heap
from hocket.ir import Plan
from hocket.sinks import is_of_sink
from hocket.tracing.captured import Captured
from hocket.tracing.raising import is_other_branch
from hocket.tracing.variants import in_form

log = logging.getLogger(__name__)

# Steps of a search that a plan could not make and eager could, because the user's step catches what an op raises.
MAX_CAUGHT = 10


class RefusedError(HocketError):
    """The step stays eager, for this reason."""


class PlanFailedError(HocketError):
    """A plan raised in its first step. The step was made eagerly."""


class InexactError(RefusedError):
    """A plan's first step has other bits than eager, where every bit has to be eager's. The step was made eagerly."""


def refusal(error: Exception) -> str:
    """Return why a step stays eager for which this error was raised."""
    if isinstance(error, CaptureError):
        return f"it could not be captured: {error}"
    if isinstance(error, RefusedError):
        return str(error)
    log.debug("hocket: the search for a plan failed", exc_info=error)
    return f"the search for a plan failed: {type(error).__name__}: {error}"


def again_by_eager(error: BaseException, executor: Executor, step: Callable[[Any], Any], batch: Any) -> Any:
    """Make a step eagerly that raised by plan and left no trace, or raise `error` with the effects that eager has.

    An error of eager's has the plan's notes.
    """
    if not isinstance(error, Exception) or is_of_sink(error):
        raise error
    if is_other_branch(error.args):
        return step(batch)  # of what it had done nothing is left (see `hocket.tracing.recording.outcomes`)
    if not executor.left_no_trace():
        executor.keep_effects(batch)
        raise error
    try:
        return step(batch)
    except Exception as own:
        for note in getattr(error, "__notes__", ()):
            own.add_note(note)
        raise


class StepRunner:
    """Makes the steps of one variant's search."""

    def __init__(self, config: TunerConfig, backend: Backend) -> None:
        self.is_done = False  # the step of this call has been made
        self.failed = False  # the step of this call raised an error of the user's
        self.result: Any = None  # its return value, until it is taken
        self._config = config
        self._backend = backend
        self._proven: WeakKeyDictionary[Captured, list[Plan]] = WeakKeyDictionary()
        self._num_compared: WeakKeyDictionary[Executor, int] = WeakKeyDictionary()
        self._was_eager = True
        self._num_caught = 0

    def start(self) -> None:
        """A call begins."""
        self.is_done = self.failed = False
        self.result = None

    def taken(self) -> Any:
        """Return the result, and hold it no longer: a graph of autograd behind it would outlive the user's."""
        result, self.result = self.result, None
        return result

    def audited(self, step: Callable[..., tuple[Any, Any]], best: Candidate, batch: Any) -> tuple[Any, Any]:
        """Make a planned step beside eager's by an auditor's `step`, and return what that returns."""
        self.start()
        found = step(best, batch, self.eager)
        self.taken()
        return found

    def perform(self, item: Item, batch: Any) -> Any:
        """Carry out a tuner's request, and return the observation.

        Raises:
            StaleCaptureError: the capture is not valid for this step. Nothing was run.
            CaptureError: the step of this call is not made yet.
            PlanFailedError, RefusedError: the step was made eagerly.
            Exception: whatever the user's step raises. `failed` is set then.
        """
        match item:
            case WatchedStep():
                return self._own(lambda: self._config.watch.run(self._config.step, batch))
            case RecordedStep(form):
                return self._own(lambda: recorded_form(self._config, batch, form))
            case VerifiedStep(form, executor):
                return self._verified(executor, form, batch)
            case SampledForms():
                return self._sampled(item, batch)
            case TimedStep(executor, form=form):
                return self._timed(executor, form, batch)

    def _own(self, run: Callable[[], Any]) -> Any:
        """An ordinary step of the user's, looked at."""
        self._was_eager = True
        try:
            found = run()
        except CaptureError:
            raise  # it cannot be watched, and was not run
        except BaseException:
            self.failed = True
            raise
        self.result, self.is_done = found.result, True
        return replace(found, result=None)

    def eager(self, batch: Any) -> Any:
        """The user's own step."""
        self._was_eager = True
        try:
            self.result = self._config.step(batch)
        except BaseException:
            self.failed = True
            raise
        self.is_done = True
        return self.result

    def _sampled(self, item: SampledForms, batch: Any) -> Mapping[str, Any]:
        if not item.captured.holds(batch) and not item.captured.moved(batch):
            raise StaleCaptureError("captured for another branch of the step")
        try:
            wide = {form: one.captured.wide for form, one in item.forms.items() if one.captured.wide is not None}
            found, _ = sample(item.captured, item.plain, item.forms, batch, item.number, wide)
        except CaptureError as error:
            found = dict.fromkeys(item.forms, str(error))
        self.eager(batch)
        return found

    def _timed(self, executor: Executor | None, form: str, batch: Any) -> float:
        if executor is None:
            return self._backend.took_ms(self.eager, batch, self._config.clock)
        if not self._is_proven(executor) or executor.captured.moved(batch):
            return self._first_planned(executor, form, batch)
        if self._was_eager:
            trim_heap()
            self._was_eager = False
        return self._backend.took_ms(partial(self._planned, executor), batch, self._config.clock)

    def _planned(self, executor: Executor, batch: Any) -> None:
        try:
            self.result = executor(batch)
        except StaleCaptureError:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again, unless eager can make the step
            failure = error
        else:
            self.is_done = True
            return
        self.failed = True  # an op that has run before: eager would have failed in it, too
        again_by_eager(failure, executor, self.eager, batch)
        self.failed = False
        if is_other_branch(failure.args) or self._is_caught(executor):
            raise StaleCaptureError(str(failure))  # nothing was timed
        found = f"it catches what its ops raise in many of its steps ({failure})"
        raise RefusedError(f"{found}: check the values, before the first op")

    def _first_planned(self, executor: Executor, form: str, batch: Any) -> float:
        """The first step of a plan, or one in which a number has a value that was never compared with eager."""
        times_ms = []
        moved = bool(executor.captured.moved(batch))

        def timed(batch: Any) -> Any:
            results = []
            took_ms = self._backend.took_ms(lambda batch: results.append(executor(batch)), batch, self._config.clock)
            times_ms.append(took_ms)
            return results[0]

        def planned(batch: Any) -> Any:
            if executor.num_first_runs == 1:
                return timed(batch)
            repeated, (result,) = verify(executor.captured, timed, [batch], eager=executor.launched)
            if executor.failure:
                raise PlanFailedError(executor.failure)
            if not repeated.equal:
                raise PlanFailedError(repeated.error or f"its graph repeats its ops wrongly ({repeated.where})")
            return result

        found = self._verified(executor, form, batch, planned)
        if found.equal or (self._backend.tolerance and not found.error and not moved):
            return times_ms[0]
        if moved:
            raise RefusedError(f"it uses a number that changes out of sight ({found.where or found.error})")
        if found.error:
            raise PlanFailedError(f"a plan failed in its first step ({found.error})")
        raise InexactError(f"a plan has other bits than eager: {found.where} differs by {found.max_abs_diff:.3g}")

    def _verified(
        self, executor: Executor, form: str, batch: Any, planned: Callable[[Any], Any] | None = None
    ) -> Difference:
        """The user's own step, and from the same state the same by plan."""
        captured = executor.captured
        if not captured.holds(batch) and not captured.moved(batch):
            raise StaleCaptureError("captured for another branch of the step")
        tolerance = self._backend.tolerance
        run = planned or executor
        with in_form(captured.trace.places, form):
            try:
                found, (self.result,) = verify(captured, run, [batch], eager=self.eager, tolerance=tolerance)
            except CaptureError as error:  # for want of memory
                raise RefusedError(str(error)) from error
        if is_other_branch((found.error,)) or (found.error and self._is_caught(executor)):
            raise StaleCaptureError(found.error)  # eager has made the step
        if found.equal or (tolerance and not found.error):
            self._proven.setdefault(captured, []).append(executor.plan)
            self._num_compared[executor] = self._num_compared.get(executor, 0) + 1
        return found

    def _is_caught(self, executor: Executor) -> bool:
        """True if the user's step may have caught what an op has raised: nothing was compared."""
        self._num_caught += 1
        return self._num_caught <= MAX_CAUGHT and executor.left_no_trace()

    def _is_proven(self, executor: Executor) -> bool:
        if executor.num_first_runs > 1:
            return self._num_compared.get(executor, 0) >= executor.num_first_runs
        return executor.plan in self._proven.get(executor.captured, ())
