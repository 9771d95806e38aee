"""Makes the step of one call as a tuner asks for it, and remembers whether it has been made.

Whatever fails on the way to a decision (a capture, a plan, an executor), the call still has to make its training step
exactly once, and an error of the user's own step has to reach him. So every step of a search goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from hocket.autotune.candidate import TunerConfig
from hocket.autotune.closeness import sample
from hocket.autotune.items import Item, RecordedStep, SampledForms, TimedStep, VerifiedStep, WatchedStep
from hocket.autotune.recording import recorded_form
from hocket.autotune.verification import verify
from hocket.backends import Backend
from hocket.errors import CaptureError, HocketError, StaleCaptureError
from hocket.execution.base import Executor
from hocket.heap import trim_heap
from hocket.tracing.saved_state import Saved
from hocket.tracing.variants import in_form

__all__ = ["AGAIN", "PlanFailedError", "RefusedError", "StepRunner", "again_by_eager"]

# A step was made that was not the one that was asked for.
AGAIN = object()


class RefusedError(HocketError):
    """The step stays eager, for this reason."""


class PlanFailedError(HocketError):
    """A plan raised in its first step; the state is what it was before it."""


class StepRunner:
    """Makes the steps of one variant's search.

    Args:
        config: the user's step, and the clock.
        backend: what plans run on.

    Attributes:
        is_done: the step of this call has been made.
        result: what it returned.
        failed: the step of this call raised; that error is the user's.
    """

    def __init__(self, config: TunerConfig, backend: Backend) -> None:
        self.is_done = False
        self.failed = False
        self.result: Any = None
        self._config = config
        self._backend = backend
        self._proven: WeakSet[Executor] = WeakSet()
        self._was_eager = True

    def start(self) -> None:
        """A call begins."""
        self.is_done = self.failed = False
        self.result = None

    def perform(self, item: Item, batch: Any) -> Any:
        """Do what a tuner asked for, and return what it showed; `AGAIN` where it has to be asked for once more.

        Raises:
            StaleCaptureError: the capture does not stand for this step; nothing was run.
            CaptureError, RefusedError, PlanFailedError: the step of this call is not made yet.
            Exception: whatever the user's step raises; `failed` is set then.
        """
        match item:
            case WatchedStep():
                return self._own(lambda: self._config.watch.run(self._config.step, batch))
            case RecordedStep(form):
                return self._own(lambda: recorded_form(self._config, batch, form))
            case VerifiedStep(form, captured, executor):
                if not captured.holds(batch) and not captured.moved(batch):
                    raise StaleCaptureError("captured for another branch of the step")
                with in_form(captured.trace.places, form):
                    found, (self.result,) = verify(captured, executor, [batch], eager=self.eager)
                return found
            case SampledForms():
                return self._sampled(item, batch)
            case TimedStep(executor):
                return self._timed(executor, batch)

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
        return found

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

    def _timed(self, executor: Executor | None, batch: Any) -> Any:
        if executor is not None and executor.captured.moved(batch):
            # A number has a value that was never compared with eager.
            found, (self.result,) = verify(executor.captured, executor, [batch], eager=self.eager)
            if not found.equal:
                raise RefusedError(f"it uses a number that changes out of sight ({found.where or found.error})")
            return AGAIN
        if executor is not None and self._was_eager:
            trim_heap()
            self._was_eager = False
        clock: Callable[[], float] = self._config.clock
        self._backend.synchronize()
        start = clock()
        if executor is None:
            self.eager(batch)
        elif executor in self._proven:
            self._planned(executor, batch)
        else:
            self._first_planned(executor, batch)
        self._backend.synchronize()
        return (clock() - start) * 1e3

    def _planned(self, executor: Executor, batch: Any) -> None:
        try:
            self.result = executor(batch)
        except StaleCaptureError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) or not executor.left_no_trace():
                self.failed = True  # an op that has run before: eager would have failed in it, too
                raise
            failure = error
        else:
            self.is_done = True
            return
        again_by_eager(failure, self.eager, batch)

    def _first_planned(self, executor: Executor, batch: Any) -> None:
        """A step of an executor that may turn out not to work at all: the state is kept, to go on eagerly."""
        captured = executor.captured
        saved = Saved(captured.trace.places.again(), captured.written())
        try:
            self.result = executor(batch)
        except StaleCaptureError:
            raise
        except Exception as error:  # whatever it is, eager can still make this step
            saved.restore()
            raise PlanFailedError(f"a plan failed in its first step ({type(error).__name__}: {error})") from error
        self._proven.add(executor)
        self.is_done = True


def again_by_eager(error: Exception, step: Callable[[Any], Any], batch: Any) -> Any:
    """Make a step eagerly that raised by plan and left no trace; an error of eager's has the plan's notes."""
    try:
        return step(batch)
    except Exception as own:
        for note in getattr(error, "__notes__", ()):
            own.add_note(note)
        raise
