"""Steps that raise by plan, which eager makes in its place where nothing of the planned one is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.execution.base import Executor
from hocket.sinks import is_of_sink
from hocket.tracing.raising import is_other_branch


def again_by_eager(error: BaseException, executor: Executor, step: Callable[[Any], Any], batch: Any) -> Any:
    """Make a step eagerly that raised by plan and left no trace. An error of eager's has the plan's notes.

    Raises:
        BaseException: `error`, where eager cannot make the step. It has the effects that it has in eager.
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
