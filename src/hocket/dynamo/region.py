"""One graph of AOTAutograd's as a region: planned like a step, called with a boxed list of its inputs.

Dynamo and AOTAutograd have guarded what the graph depends on, and it is a function of tensors and numbers: nothing of
Python is watched, recorded or put back. The variants, the search, the verification and the audits are those of a step
(`hocket.autotune`)::

    call ──> fast path     the native check knows the inputs: begin, empty the list, run, finish
             pool          searches, audits, notes times; meets other shapes and numbers
             plain         the graph op by op: busy in another thread, not plannable, or no plan is faster

Each call that runs a plan empties the list before the first op, so that inputs are freed after their last use.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakSet

from torch import fx

from hocket.adaptation import DriftLimits
from hocket.autotune.candidate import TunerConfig
from hocket.autotune.pool import VariantPool
from hocket.autotune.store import DecisionStore
from hocket.dynamo.graphs import Outputs, boxed, computing, why_unplannable
from hocket.ir import Machine
from hocket.pystate.watch import PurityWatch
from hocket.tracing.state import inventory

__all__ = ["Region", "region_of", "regions"]

log = logging.getLogger(__name__)

# Planned calls in a row that leave the pool out; then it gets their times, and audits what is due.
MAX_FAST = 100
_NEVER = 2**62
_ALIVE: WeakSet[Region] = WeakSet()


def region_of(
    graph: fx.GraphModule, kind: str, *, numerics: str, cache: bool | str | os.PathLike[str]
) -> tuple[Region | None, Callable[[list[Any]], Any]]:
    """A boxed function for a graph of AOTAutograd's, with its region if it can be planned.

    Args:
        graph: of ATen ops.
        kind: ``"forward"``, ``"backward"`` or ``"inference"``, for messages.
        numerics: as for `hocket.schedule`.
        cache: as for `hocket.schedule`.
    """
    plain = boxed(graph)
    made: Any = plain
    reason = why_unplannable(graph)
    if not reason:
        try:
            compute, outputs = computing(graph)
            made = Region(kind, plain, compute, outputs, numerics=numerics, cache=cache)
        except Exception as error:  # whatever it is, the graph runs as it stands
            reason = f"{type(error).__name__}: {error}"
            log.debug("hocket: a region could not be made", exc_info=error)
    if reason:
        log.info("hocket: a %s graph runs op by op: %s", kind, reason)

    def call(inputs: list[Any]) -> Any:
        return made(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for this attribute
    return made if isinstance(made, Region) else None, call


def regions() -> list[Region]:
    """The regions of this process, each with its `verdict` and `why`."""
    return list(_ALIVE)


class Region:
    """A graph that finds its own plan; call it with a list of its inputs, which is emptied.

    Args:
        kind: for messages.
        plain: the graph as it stands, boxed.
        compute: the graph returning each computed value once, boxed.
        outputs: how the graph's result is made of these.
        numerics: as for `hocket.schedule`.
        cache: as for `hocket.schedule`.

    Attributes:
        verdict: ``"searching"``, ``"planned"`` or ``"plain"``.
        why: the reason.
        was_called: there was a call.
    """

    def __init__(
        self,
        kind: str,
        plain: Callable[[list[Any]], Any],
        compute: Callable[[list[Any]], Any],
        outputs: Outputs,
        *,
        numerics: str = "bitwise",
        cache: bool | str | os.PathLike[str] = False,
    ) -> None:
        self.kind = kind
        self.verdict, self.why = "searching", "the first calls are recorded and compared"
        self.was_called = False
        self._plain = plain
        self._pass = outputs.inputs
        self._constants = list(outputs.constants)
        self._picked = outputs.picker()
        self._moves = outputs.moves
        self._keeps_batches = numerics == "close"  # whose forms are compiled later
        self._busy = threading.Lock()
        self._pool: VariantPool | None = VariantPool(_config(compute, numerics, cache), lambda: None)
        self._fast: _FastCall | None = None
        _ALIVE.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        """The graph's outputs."""
        self.was_called = True
        if self._pool is None or not self._busy.acquire(blocking=False):
            return self._plain(inputs)
        try:
            kept = [inputs[place] for place in self._pass]
            fast = self._fast
            found = NotImplemented if fast is None else fast(inputs)
            if found is NotImplemented:
                found = self._by_pool(inputs)
            else:
                found = list(found)
        finally:
            self._busy.release()
        return self._picked([*found, *kept, *self._constants])

    @property
    def is_final(self) -> bool:
        """True if a decision stands, and no form is being compiled that could change it."""
        pool = self._pool
        return pool is None or (self.verdict == "planned" and pool.current.is_final)

    def give_up(self, reason: str) -> None:
        """Run the graph op by op from now on."""
        with self._busy:
            self._give_up(reason)

    def _by_pool(self, inputs: list[Any]) -> list[Any]:
        """A call that is searched for, audited or met for the first time."""
        pool = self._pool
        assert pool is not None
        if self._fast is not None:
            self._fast.note()
            self._fast = None
        found = pool(list(inputs))
        inputs.clear()
        variant = pool.current
        if variant.settled:
            best = variant.decision.best
            if best is None and not self._moves and variant.is_final:
                self._give_up(variant.decision.reason)
            elif best is not None:
                self.verdict, self.why = "planned", variant.decision.reason
                self._fast = _FastCall.of(pool)
                if not self._keeps_batches:
                    for captured in (*variant.forms.values(), best.captured):
                        captured.forget_batch()
        return list(found)

    def _give_up(self, reason: str) -> None:
        """Run the graph as it stands from now on."""
        pool, self._pool, self._fast = self._pool, None, None
        if pool is None:
            return
        pool.close()
        self.verdict, self.why = "plain", reason
        log.info("hocket: a %s graph runs op by op: %s", self.kind, reason)


class _FastCall:
    """Planned calls of one variant, as native calls on a list that is emptied before the ops run."""

    def __init__(self, variant: Any, check: Any, step: Any, left: int) -> None:
        self._variant, self._holds, self._left = variant, check.holds, left
        self._begin, self._run, self._finish = step
        self._times_ms: list[float] = []
        self._pid = os.getpid()

    @staticmethod
    def of(pool: VariantPool) -> _FastCall | None:
        """None where the pool has to make the next call."""
        variant = pool.current
        left = variant.calls_until_audit(MAX_FAST)
        step = variant.decision.best.executor.boxed() if variant.decision.best is not None else None
        check = pool.recognised
        return None if left < 1 or step is None or check is None else _FastCall(variant, check, step, left)

    def __call__(self, inputs: list[Any]) -> Any:
        if not self._left or os.getpid() != self._pid:
            return NotImplemented
        start = perf_counter()
        if not self._holds(inputs) or not self._begin(inputs):
            return NotImplemented
        inputs.clear()
        self._left -= 1
        try:
            self._run()
        except BaseException as error:
            self._variant.decision.best.executor.annotate(error)
            raise
        found = self._finish()
        self._times_ms.append((perf_counter() - start) * 1e3)
        return found

    def note(self) -> None:
        """Tell the variant what these calls took."""
        self._variant.note_direct(self._times_ms, None)
        self._left = 0


def _config(compute: Callable[[list[Any]], Any], numerics: str, cache: Any) -> TunerConfig:
    def step(batch: list[Any]) -> Any:
        return compute(list(batch))

    return TunerConfig(
        step=step,
        model=[],
        optimizer=[],
        places=inventory([], []),
        watch=PurityWatch(step, ()),
        planner="auto",
        guard=True,
        strict=False,
        machine=Machine.here(),
        executor="auto",
        clock=perf_counter,
        drift=DriftLimits(rest_steps=_NEVER),  # activations are not kept for another search
        store=DecisionStore.of(cache),
        numerics=numerics,
        is_region=True,
    )
