"""A step in each of its forms as graphs, traced with the batch of the coming step; nothing shows that it was traced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hocket.autotune.admission import RefusedError
from hocket.autotune.candidate import TunerConfig
from hocket.autotune.compiling import FormCompiler
from hocket.errors import CaptureError, StaleCaptureError
from hocket.tracing.captured import Captured, capture_step, relowered
from hocket.tracing.purity.undo import Before
from hocket.tracing.purity.watch import PurityWatch, named
from hocket.tracing.state import Inventory, inventory
from hocket.tracing.variants import (
    compiled_from,
    compiled_rewrites_of,
    forms_of,
    in_form,
    native_ops_of,
    rewrites_of,
    rewritten,
)

__all__ = ["captured_forms"]

log = logging.getLogger(__name__)

# A step's less likely forms are not worth a plan of so many ops.
MAX_OPS = 4000


def captured_forms(config: TunerConfig, batch: Any, compiler: FormCompiler | None = None) -> dict[str, Captured]:
    """The forms that could be captured, the likeliest first; compiled ones that are kept, if there is a compiler.

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
    if config.numerics == "close":
        found |= _rewritten_forms(config, batch, found, places)
        found |= _compiled_forms(config, batch, found, places, compiler) if compiler is not None else {}
    _expect_untouched(before)
    if not found:
        assert failure is not None, "there is at least one form"
        raise failure
    return found


def _rewritten_forms(
    config: TunerConfig, batch: Any, found: Mapping[str, Captured], places: Inventory
) -> dict[str, Captured]:
    """The rewritten forms of the likeliest one, those that can be captured; what they leave has the same layout."""
    made: dict[str, Captured] = {}
    for plain, captured in list(found.items())[:1]:
        for form in rewrites_of(plain, places, batch) if len(captured.graph) <= MAX_OPS else ():
            try:
                with in_form(places, form):
                    other = _traced(config, batch, rewritten(config.step, form, places))
                    if ops := native_ops_of(form):
                        other = relowered(other, split=False, native_ops=ops)
            except CaptureError as error:
                log.info("hocket: the step has no form %r: %s", form, error)
                continue
            known = {captured.graph.fingerprint, *(each.graph.fingerprint for each in made.values())}
            if _same_layout(captured, other) and other.graph.fingerprint not in known:
                made[form] = replace(other, step=config.step)
    return made


def _compiled_forms(
    config: TunerConfig, batch: Any, found: Mapping[str, Captured], places: Inventory, compiler: FormCompiler
) -> dict[str, Captured]:
    """The compiled forms that are kept, of the likeliest form; others are left to the compiler."""
    made: dict[str, Captured] = {}
    for plain, captured in list(found.items())[:1]:
        for form in compiled_rewrites_of(plain, places, batch) if len(captured.graph) <= MAX_OPS else ():
            failure: CaptureError | None = None
            for source in compiled_from(form, places):
                try:
                    step = found.get(source) or _source(config, batch, source, places)
                    if _same_layout(captured, step) and (kept := compiler.offered(form, step)) is not None:
                        made[form] = kept
                    break
                except CaptureError as error:
                    failure = failure or error
            else:
                log.info("hocket: the step has no form %r: %s", form, failure)
    return made


def _source(config: TunerConfig, batch: Any, form: str, places: Inventory) -> Captured:
    """A step to be compiled."""
    with in_form(places, form):
        return replace(_traced(config, batch, rewritten(config.step, form, places)), step=config.step)


def _same_layout(first: Captured, second: Captured) -> bool:
    """Whether two captures of a step leave gradients, and what they bind anew, in the same layout."""
    left: list[list[Any]] = []
    for each in (first.trace, second.trace):
        nodes = [*each.gradients.values(), *each.rebound.values()]
        left.append([None if node is None else _layout(node.meta["val"]) for node in nodes])
    return left[0] == left[1]


def _layout(tensor: Any) -> tuple[Any, ...]:
    # The stride of a dimension of one element says nothing.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tuple(strides), tensor.dtype


def _traced(config: TunerConfig, batch: Any, step: Callable[[Any], Any]) -> Captured:
    watch: PurityWatch = config.watch
    known: dict[str, Any] = {
        "further": (*watch.rebound.values(), *watch.moving.values()),
        "appended": tuple(watch.appended.values()),
        "live_leaves": frozenset(watch.live_leaves),
    }
    return capture_step(step, config.model, config.optimizer, batch, split=False, **known)


def _capture(config: TunerConfig, batch: Any) -> Captured:
    watch: PurityWatch = config.watch
    try:
        return _traced(config, batch, config.step)
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
