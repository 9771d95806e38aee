"""A step in each of its forms as graphs, traced with the batch of the coming step; nothing shows that it was traced."""

from __future__ import annotations

from typing import Any

from hocket.autotune.admission import RefusedError
from hocket.autotune.candidate import TunerConfig
from hocket.errors import CaptureError, StaleCaptureError
from hocket.tracing.captured import Captured, capture_step
from hocket.tracing.purity.undo import Before
from hocket.tracing.purity.watch import PurityWatch, named
from hocket.tracing.state import inventory
from hocket.tracing.variants import forms_of, in_form

__all__ = ["captured_forms"]

# A step's less likely forms are not worth a plan of so many ops.
MAX_OPS = 4000


def captured_forms(config: TunerConfig, batch: Any) -> dict[str, Captured]:
    """The forms that could be captured, the likeliest first.

    Raises:
        CaptureError: no form could be; says why and where.
        RefusedError: a trace has written what watched steps did not.
        StaleCaptureError: a number that was followed cannot be; the next variant takes it as it is.
    """
    places = inventory(config.model, config.optimizer)
    before = Before(config.watch)
    failure: CaptureError | None = None
    found: dict[str, Captured] = {}
    for form in forms_of(places):
        try:
            with in_form(places, form):
                made = _capture(config, batch)
        except CaptureError as error:
            failure = failure or error
            continue
        except StaleCaptureError:
            _expect_untouched(before)
            raise
        if not len(made.graph):
            failure = failure or CaptureError("it runs no ops")
            continue
        if not found or len(made.graph) <= MAX_OPS:
            found[form] = made
    _expect_untouched(before)
    if not found:
        assert failure is not None, "there is at least one form"
        raise failure
    return found


def _capture(config: TunerConfig, batch: Any) -> Captured:
    watch: PurityWatch = config.watch
    known: dict[str, Any] = {
        "further": (*watch.rebound.values(), *watch.moving.values()),
        "appended": tuple(watch.appended.values()),
        "live_leaves": frozenset(watch.live_leaves),
    }
    try:
        return capture_step(config.step, config.model, config.optimizer, batch, split=False, **known)
    except CaptureError as error:
        if not watch.moving and not watch.live_leaves:
            raise
        # Perhaps a number that changes between steps cannot be followed: then there is a capture for each value.
        watch.moving.clear()
        watch.live_leaves.clear()
        watch.follows_numbers = False
        raise StaleCaptureError("a number that changes between steps cannot be followed") from error


def _expect_untouched(before: Before) -> None:
    """Raise if a trace has changed what watched steps did not (a branch of the user's for an error, say)."""
    changes, lasting = before.undo()
    if lasting:
        raise RefusedError(f"it changes {named(lasting)} when it is traced, which cannot be undone: it is done twice")
    if changes:
        raise RefusedError(f"it changes {named(changes)} when it is traced")
