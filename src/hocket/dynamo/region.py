"""One graph of AOTAutograd's as a region: planned like a step, called with a boxed list of its inputs.

Dynamo and AOTAutograd have guarded what the graph depends on, and it is a function of tensors and numbers: nothing of
Python is watched, recorded or put back. The variants, the search, the verification and the audits are those of a step
(`hocket.autotune`)::

    call ──> native call   the check knows the inputs: begin, empty the list, run, put the result together
             pool          searches, audits, notes times; meets other shapes and numbers
             plain         the graph op by op: busy in another thread, not plannable, or no plan is faster

A search that other load on the machine disturbed, so that it was not clear which is faster, is made again after
`PAUSE` calls. So is that of a region whose planned calls have drifted (`hocket.adaptation`).

Each call that runs a plan empties the list before the first op, so that inputs are freed after their last use.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch import fx

from hocket.autotune.candidate import TunerConfig
from hocket.autotune.pool import VariantPool
from hocket.autotune.store import DecisionStore
from hocket.dynamo.graphs import Outputs, boxed, computing, why_unplannable
from hocket.ir import Machine
from hocket.pystate.watch import PurityWatch
from hocket.tracing.state import inventory

log = logging.getLogger(__name__)

# Planned calls in a row that leave the pool out; then it gets their times, and audits what is due.
MAX_FAST = 100
# Calls op by op before a search that was not clear is made again, and how often that is done.
PAUSE = 100
MAX_UNCLEAR = 2
_ALIVE: WeakSet[Region] = WeakSet()


def region_of(
    graph: fx.GraphModule, kind: str, *, numerics: str, cache: bool | str | os.PathLike[str]
) -> tuple[Region | None, Callable[[list[Any]], Any]]:
    """A boxed function for a graph of AOTAutograd's, with its region if it can be planned."""
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
        is_clear: the verdict was not left open by load on the machine.
        compared: speed of the compiled graph over the graph as it stands; empty before that is known.
        on_drift: called when another plan is searched for.
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
        self.is_clear = True
        self.compared = ""
        self.on_drift: Callable[[], object] = lambda: None
        self._plain = plain
        self._outputs = outputs
        self._forgets_batches = numerics != "close"  # whose forms are compiled later
        self._busy = threading.Lock()
        self._settings = _config(compute, numerics, cache)
        self._pool: VariantPool | None = VariantPool(self._settings, lambda: None)
        self._fast: Any = None  # planned calls, each of them one native call, until Python is needed next
        self._num_unclear = self._left_to_pause = 0
        _ALIVE.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        """The graph's outputs."""
        self.was_called = True
        pool = self._pool
        if pool is None or not self._busy.acquire(blocking=False):
            return self._plain(inputs)
        try:
            if self._pool is not pool:  # given up at this moment, by another thread
                return self._plain(inputs)
            if self._fast is not None:
                try:
                    found = self._fast(inputs)
                except BaseException as error:
                    self._end_fast(pool, error)
                    raise
                if found is not NotImplemented:
                    return found
                self._end_fast(pool)
            return self._by_pool(pool, inputs)
        finally:
            self._busy.release()

    @property
    def is_final(self) -> bool:
        """True if a decision stands, and no form is being compiled that could change it."""
        pool = self._pool
        return pool is None or (self.verdict == "planned" and pool.current.is_final)

    def compile(self) -> bool:
        """Compile further forms now and wait for them. Return True if there are any, which the next calls try."""
        with self._busy:
            return self._pool is not None and self._pool.current.compile()

    def give_up(self, reason: str) -> None:
        """Run the graph op by op from now on."""
        with self._busy:
            self._give_up(reason)

    def _end_fast(self, pool: VariantPool, error: BaseException | None = None) -> None:
        fast, self._fast = self._fast, None
        pool.current.note_direct(fast.times_ms(), error)

    def _by_pool(self, pool: VariantPool, inputs: list[Any]) -> Any:
        """A call that is searched for, audited or met for the first time."""
        if pool.current.has_drifted:
            log.info("hocket: the calls of a %s graph have drifted: plans are searched again", self.kind)
            pool = self._begin_anew(recalls=False)
            self.on_drift()
        if self._left_to_pause:
            self._left_to_pause -= 1
            return self._plain(inputs)
        passed = [inputs[place] for place in self._outputs.inputs]
        found = pool(list(inputs))
        inputs.clear()
        if pool.current.settled:
            self._settle(pool)
        return self._outputs.put_together(found, passed)

    def _settle(self, pool: VariantPool) -> None:
        variant = pool.current
        best = variant.decision.best
        if best is not None:
            self.verdict, self.why = "planned", variant.decision.reason
            self._fast = self._fast_call(pool)
            if self._forgets_batches:
                for captured in (*variant.forms.values(), best.captured):
                    captured.example.value = None  # activations
        elif not self._outputs.moves and variant.is_final:
            self.is_clear = variant.decision.is_clear
            if self.is_clear or self._num_unclear >= MAX_UNCLEAR:
                self._give_up(variant.decision.reason)
            else:
                self._num_unclear += 1
                self._left_to_pause = PAUSE
                self._begin_anew()

    def _fast_call(self, pool: VariantPool) -> Any:
        """Planned calls of the current variant as native ones, or None where the pool has to make the next call."""
        best, check, outputs = pool.current.decision.best, pool.recognised, self._outputs
        left = pool.current.calls_until_upkeep(MAX_FAST)
        if left < 1 or best is None or check is None or (binding := best.executor.binding) is None:
            return None
        return binding.boxed(check, outputs.inputs, list(outputs.constants), outputs.order, left)

    def _begin_anew(self, *, recalls: bool = True) -> VariantPool:
        """Forget the plan; the next call is recorded. Without `recalls`, what the store knows is not used, either."""
        if self._pool is not None:
            self._pool.close()
        self.verdict = "searching"
        self._pool = VariantPool(replace(self._settings, recalls=recalls), lambda: None)
        return self._pool

    def _give_up(self, reason: str) -> None:
        pool, self._pool, self._fast = self._pool, None, None
        if pool is None:
            return
        pool.close()
        self.verdict, self.why = "plain", reason
        log.info("hocket: a %s graph runs op by op: %s", self.kind, reason)


def _config(compute: Callable[[list[Any]], Any], numerics: str, cache: Any) -> TunerConfig:
    def step(batch: list[Any]) -> Any:
        return compute(list(batch))

    return TunerConfig(
        step=step,
        model=[],
        optimizer=[],
        places=inventory([], []),
        watch=PurityWatch(step, ()),
        machine=Machine.here(),
        store=DecisionStore.of(cache),
        numerics=numerics,
        is_region=True,
    )
