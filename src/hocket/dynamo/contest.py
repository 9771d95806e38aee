"""Dynamo's graph as it stands against the same graph compiled into regions: the user's own calls decide.

A region is only compared with its own graph run op by op. Whether it pays for AOTAutograd's way around each call shows
in the loop, so both run in turns there and the faster one stays::

    first call    both run forward and backward on copies: the original stays where the compiled graph raises, or where
                  "bitwise" is asked for and bits differ. The call itself is the original's, which stays if the
                  gradients are differentiated
    searching     the compiled graph runs, and its regions find plans; where none is planned, the original stays
    in turns      blocks of cycles by each until it is clear which is faster; that stays, the original in a draw
    searching     again, where a compiled graph stayed and one of its regions has drifted, or where it was not faster,
                  and forms of its regions are still to be compiled

A *cycle* is the time from one call to the next, with the backward, the update and all else in between. Calls before one
backward belong to one cycle. Where no gradient is taken, a cycle is the call alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from hocket.autotune.comparison import Turns, expected_interval
from hocket.autotune.store import Remembered
from hocket.dynamo.outcome import difference
from hocket.dynamo.region import Region
from hocket.errors import CaptureError

log = logging.getLogger(__name__)

# Calls without a backward after which a cycle ends.
MAX_CALLS = 64
# Calls after which regions that are not final are no longer waited for: forms of "close" that are never compiled.
MAX_SEARCHED = 500
# Where bits need not be equal: an op that errs, in a layout that it does not know, is wrong by more.
TOLERANCE = 0.02
# Failed attempts to compare bits before the original stays.
MAX_FAILED = 3


class Contest:
    """A function like Dynamo's graph that finds out which of two callables is faster.

    Args:
        original: Dynamo's graph as it stands.
        compiled: the same by regions.
        made: its regions; those of the backward may be added later.
        held: tensors that the graph uses beside its arguments.
        needs_equal_bits: the compiled graph may only stay with the bits of the original.
        is_known: an earlier process found the compiled graph faster.
        keep: called with the verdict, unless load on the machine left it open.
        seed: of the order of turns. Graphs of one step have different seeds, so that each is judged alone. Without a
            seed there are no turns, and the compiled graph stays if any of its regions has a plan.
        traced: the compiled graph by AOTAutograd, for calls that ask for shapes. `compiled` by default.

    Attributes:
        num_undecided: calls before it was clear which of the two stays.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        compiled: Callable[..., Any],
        made: list[Region],
        held: Sequence[torch.Tensor],
        *,
        needs_equal_bits: bool,
        is_known: bool,
        keep: Callable[[Remembered], object],
        seed: str,
        traced: Callable[..., Any] | None = None,
    ) -> None:
        self._original, self._compiled, self._traced = original, compiled, traced or compiled
        self._made, self._held = made, held
        self._is_known, self._keep, self._seed = is_known, keep, seed
        self._stays: Callable[..., Any] | None = None
        self._needs_equal_bits = needs_equal_bits
        self._stage = "first"
        self._busy = threading.Lock()
        self.num_undecided = self._num_failed = self._num_calls = 0
        self._awaits_forms = False
        self._turns: Turns | None = None
        self._cycle: _Cycle | None = None

    @property
    def is_compiled(self) -> bool:
        return self._stage == "compiled"

    def __call__(self, *args: Any) -> Any:
        """The outputs of the graph."""
        if reason := _obstacle():
            self._say(reason)
            return self._original(*args)
        run = self._stays
        if run is not None:
            return run(*args)
        self.num_undecided += 1
        if self._stage == "first" and any(isinstance(value, FakeTensor) for value in args):
            # Dynamo cuts the graph of a DistributedDataParallel. The first call of what AOTAutograd gives says which
            # shapes the next part gets.
            return self._traced(*args)
        if not self._busy.acquire(blocking=False):
            return self._original(*args)
        try:
            if self._stage == "first":
                self._compare_bits(args)
                return self.watched(self._original(*args))
            if self._stage == "searching":
                self._wait_for_regions()
            if self._stage == "turns":
                self._take_turn()
            cycle = self._cycle
            result = self._contender()(*args)
            if cycle is not None:
                cycle.called(result)
            return result
        finally:
            self._busy.release()

    def differentiated_twice(self) -> None:
        """Gradients were differentiated again: let the original run from the next call on."""
        if self._stays is not self._original:
            self._keep_original("its gradients are differentiated again")

    def close(self) -> None:
        """Close all lanes: the original runs from now on."""
        if self._stays is not self._original:
            self._keep_original("it is not used any more")

    def _say(self, reason: str) -> None:
        for region in self._made:
            if region.verdict == "searching":
                region.why = f"the graph runs as it stands while {reason}"

    def _contender(self) -> Callable[..., Any]:
        if self._stays is not None:
            return self._stays
        plays_original = self._turns is not None and self._turns.contender == "original"
        return self._original if plays_original else self._compiled

    def watched(self, result: Any) -> Any:
        """The result of a call, whose backward may be one that is differentiated again."""

        def look(gradients: Any) -> None:
            if torch.is_grad_enabled():
                self.differentiated_twice()

        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(look)
        return result

    def _compare_bits(self, args: Sequence[Any]) -> None:
        try:
            tolerance = 0.0 if self._needs_equal_bits else TOLERANCE
            where = difference(self._original, self._compiled, args, self._held, tolerance)
        except CaptureError as error:
            self._keep_original(f"it could not be compared with the graph as it stands ({error})")
        except Exception as error:  # an error of the user's comes from his own call
            self._num_failed += 1
            log.debug("hocket: a compiled graph was not compared", exc_info=error)
            if self._num_failed >= MAX_FAILED:
                self._keep_original(f"the graph as it stands fails on copies ({type(error).__name__}: {error})")
        else:
            self._stage = "searching"
            for region in self._made:
                region.was_called = False  # the user's own backward may take another way
            if where:
                what = "bits" if self._needs_equal_bits else "values"
                reason = f"AOTAutograd computes other {what} than eager: {where} differs"
                self._keep(Remembered("eager", reason))
                self._keep_original(reason)

    def _wait_for_regions(self) -> None:
        self._num_calls += 1
        called = [region for region in self._made if region.was_called]
        if self._is_known:
            self._keep_compiled("it is remembered to be faster than the graph as it stands")
        elif not called or not self._may_begin_turns(called):
            return
        elif all(region.verdict != "planned" for region in called):
            reason = f"no region has a plan that is faster ({called[0].why})"
            if all(region.is_clear for region in called):
                self._keep(Remembered("eager", reason))
            self._keep_original(reason)
        elif not self._seed:
            self._keep_compiled("")
        else:
            self._stage, self._turns = "turns", Turns("original", "compiled", self._seed)

    def _may_begin_turns(self, called: Sequence[Region]) -> bool:
        has_plans = not self._awaits_forms and all(region.verdict != "searching" for region in called)
        return has_plans or self._are_final(called)

    def _are_final(self, called: Sequence[Region]) -> bool:
        return self._num_calls > MAX_SEARCHED or all(region.is_final for region in called)

    def _take_turn(self) -> None:
        """Let the next cycle begin if the last one is over, and decide after all of them."""
        assert self._turns is not None
        if self._cycle is not None:
            duration_ms = self._cycle.duration_ms()
            if duration_ms is None:
                return
            self._turns.note(duration_ms)
        self._cycle = _Cycle()
        if self._turns.is_over:
            self._decide(self._turns)

    def _decide(self, found: Turns) -> None:
        if not found.is_faster and not self._are_final([region for region in self._made if region.was_called]):
            self._stage, self._cycle, self._turns, self._awaits_forms = "searching", None, None, True
            return
        low, high = expected_interval(found.low, found.high)
        reason = (
            f"with regions {found.speedup:.2f}x as fast as the graph as it stands ({low:.2f} to {high:.2f} expected)"
        )
        if found.is_clear:
            kind = "regions" if found.is_faster else "eager"
            self._keep(Remembered(kind, reason, found.speedup, found.low, found.high, found.incumbent_ms))
        if found.is_faster:
            self._keep_compiled(reason)
        else:
            self._keep_original(reason)

    def _keep_compiled(self, reason: str) -> None:
        for region in self._made:
            region.compared = reason
            region.on_drift = self._search_again
        self._stage, self._cycle, self._turns = "compiled", None, None
        self._stays = self._compiled
        log.info("hocket: a graph is compiled: %s", reason)

    def _search_again(self) -> None:
        """A region of the compiled graph searches for another plan: both are timed again after that."""
        if self._stage == "compiled":
            self._stage, self._num_calls, self._is_known, self._awaits_forms = "searching", 0, False, False
            self._stays = None

    def _keep_original(self, reason: str) -> None:
        self._stays, self._stage, self._cycle, self._turns = self._original, "original", None, None
        self._compiled = self._original
        for region in self._made:
            region.give_up(f"the graph runs as it stands: {reason}")
        log.info("hocket: a graph runs as it stands: %s", reason)


def _obstacle() -> str:
    """Say why a call has to be that of the graph as it stands. Empty if it need not be.

    A checkpoint around a call makes it again in the backward, and compares what both have saved.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are set, as by a checkpoint around it"
    return "it is differentiated in forward mode" if forward_ad._current_level >= 0 else ""


class _Cycle:
    """One cycle, timed from its construction on."""

    def __init__(self) -> None:
        self._start_s = self._returned_s = perf_counter()
        self._num_calls = 0
        self._awaits_backward = self._has_backward = False

    def called(self, result: Any) -> None:
        """Record that a call has returned this."""
        self._returned_s = perf_counter()
        self._num_calls += 1
        nodes = [value.grad_fn for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        node = next((node for node in nodes if node is not None), None)
        self._awaits_backward = node is not None
        if node is not None:
            node.register_prehook(self._began_backward)

    def duration_ms(self) -> float | None:
        """The duration if the next call belongs to another cycle."""
        if self._has_backward:
            return (perf_counter() - self._start_s) * 1e3
        if self._awaits_backward and self._num_calls < MAX_CALLS:
            return None
        return (self._returned_s - self._start_s) * 1e3

    def _began_backward(self, gradients: Any) -> None:
        self._has_backward = True
