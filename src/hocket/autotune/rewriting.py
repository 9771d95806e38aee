"""The rewritten forms of a recorded step, for ``numerics="close"``. They need no further step of the user's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hocket.autotune.compiling import FormCompiler
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.rerecording import rerecorded
from hocket.tracing.variants import compiled_from, compiled_rewrites_of, native_ops_of, rewrites_in, rewrites_of

log = logging.getLogger(__name__)

# Ops above which a step's less likely forms are not worth a plan.
MAX_OPS = 4000


def rewritten_forms(plain: tuple[str, Captured], compiler: FormCompiler | None) -> dict[str, Captured]:
    """Return all forms that the step can be rewritten to, and cached compiled forms if there is a compiler."""
    form, captured = plain
    if len(captured.graph) > MAX_OPS:
        return {}
    made = _rewritten(form, captured)
    return made | (_compiled(form, captured, made, compiler) if compiler is not None else {})


def _rewritten(plain: str, captured: Captured) -> dict[str, Captured]:
    made: dict[str, Captured] = {}
    for form in rewrites_of(plain, captured):
        try:
            other = rewritten(captured, form)
        except CaptureError as error:
            log.info("hocket: the step has no form %r: %s", form, error)
            continue
        known = {captured.graph.fingerprint, *(each.graph.fingerprint for each in made.values())}
        if _same_layout(captured, other) and other.graph.fingerprint not in known:
            made[form] = other
    return made


def rewritten(captured: Captured, form: str) -> Captured:
    """The captured step in this form, or a `CaptureError`."""
    other = rerecorded(captured, rewrites_in(form))
    ops = (*native_ops_of(form), *captured.lowered.native_ops)
    return relowered(other, split=False, native_ops=ops) if ops else other


def _compiled(
    plain: str, captured: Captured, known: Mapping[str, Captured], compiler: FormCompiler
) -> dict[str, Captured]:
    made: dict[str, Captured] = {}
    for form in compiled_rewrites_of(plain, captured):
        failure: CaptureError | None = None
        for source in compiled_from(form, captured.trace.places):
            try:
                step = captured if source == plain else known.get(source) or rewritten(captured, source)
                if _same_layout(captured, step) and (kept := compiler.offered(form, step)) is not None:
                    made[form] = kept
                break
            except CaptureError as error:
                failure = failure or error
        else:
            log.info("hocket: the step has no form %r: %s", form, failure)
    return made


def _same_layout(first: Captured, second: Captured) -> bool:
    """Return True if two captures of a step leave gradients and rebound tensors in the same layout."""
    left: list[list[Any]] = []
    for each in (first.trace, second.trace):
        nodes = [*each.gradients.values(), *each.rebound.values()]
        left.append([None if node is None else _layout(node.meta["val"]) for node in nodes])
    return left[0] == left[1]


def _layout(tensor: Any) -> tuple[Any, ...]:
    # The stride of a dimension of one element says nothing.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tuple(strides), tensor.dtype
