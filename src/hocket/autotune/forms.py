"""Further forms of a recorded step, for ``numerics="close"``: rewritten and compiled ones. They need no further steps.

Compiled forms that are cached are there at once, others are compiled in the background while the step runs. Compiling
occupies a core for some tens of seconds, and a search follows. A short training would not repay that, and its length is
unknown. So compiling begins once the step has run for as long as compiling costs: at worst that doubles the total cost
(the ski rental argument), and a short training is left alone.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from hocket import native
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.compiling.folder import Compiling
from hocket.tracing.compiling.process import CompilingProcess, niceness
from hocket.tracing.rerecording import rerecorded
from hocket.tracing.variants import (
    compiled_from,
    compiled_rewrites_of,
    has_channels_last,
    native_ops_of,
    plain_of,
    rewrites_in,
    rewrites_of,
)

log = logging.getLogger(__name__)

# A step that has run for so long since it was decided is compiled.
BEGIN_AFTER_S = 30.0
# Ops above which a step's less likely forms are not worth a plan.
MAX_OPS = 4000


class FormCompiler:
    """Compiles forms of one captured step, cached in a folder or for this variant only."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"hocket-compiled-{uuid4().hex}"
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._left: dict[str, Compiling] = {}
        self._spent_s = 0.0

    def offered(self, form: str, captured: Captured) -> Captured | None:
        """The compiled form of a step if it is cached. Otherwise it is queued, or a `CaptureError` says why not."""
        if not native.available():
            raise CaptureError(f"kernels are called natively: {native.available().why}")
        compiling = Compiling(captured, self._folder, threads=torch.get_num_threads())
        found = compiling.found()
        if found is None:
            self._left[form] = compiling
        return found

    def only_fastest_layout(self, step_ms: Mapping[str, float]) -> None:
        """Leave out forms in a layout that is the slower one where nothing is compiled, as convolutions are not."""
        for form, compiling in list(self._left.items()):
            last, plain = has_channels_last(form), plain_of(form)
            known = {other: ms for other, ms in step_ms.items() if plain_of(other) == plain}
            own, others = (
                min((ms for other, ms in known.items() if (has_channels_last(other) == last) is same), default=math.inf)
                for same in (True, False)
            )
            if others < own and not compiling.is_started:
                del self._left[form]

    def note(self, step_ms: float, speedup: float) -> bool:
        """Record the duration of a step of the decided variant. Return True if forms have been compiled by now."""
        if not self._left:
            return False
        self._spent_s += step_ms / 1e3
        if self._spent_s >= BEGIN_AFTER_S:
            self.start(niceness(speedup))
        return self.is_done

    def start(self, nice: int = 0) -> None:
        """Begin with what is left to be compiled: one process, for all forms, nicer than this one by that increment."""
        process = CompilingProcess(nice)
        for form, compiling in list(self._left.items()):
            try:
                if not compiling.is_started:
                    compiling.start(process)
            except CaptureError as error:
                log.info("hocket: the step has no form %r: %s", form, error)
                del self._left[form]
        try:
            process.begin()
        except CaptureError as error:
            log.info("hocket: the step has no compiled form: %s", error)
            self.close()

    def wait(self) -> None:
        """Return when nothing is on its way any more."""
        for compiling in self._left.values():
            compiling.wait()

    @property
    def has_forms_left(self) -> bool:
        """True while forms are still to be compiled or taken."""
        return bool(self._left)

    @property
    def is_done(self) -> bool:
        """True if something was compiled, and nothing is being compiled."""
        return bool(self._left) and all(each.is_done for each in self._left.values())

    def take(self) -> dict[str, Captured]:
        """Wait for pending compilations and return the compiled forms. The log says why others failed."""
        made: dict[str, Captured] = {}
        for form, compiling in list(self._left.items()):
            del self._left[form]
            try:
                made[form] = compiling.result()
            except Exception as error:  # noqa: BLE001  # the step keeps its other forms
                log.info("hocket: the step has no form %r: %s", form, error)
        return made

    def close(self) -> None:
        """End what is being compiled."""
        for compiling in self._left.values():
            compiling.close()
        self._left.clear()


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
