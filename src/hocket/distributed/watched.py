"""Is the step only what its graph says? It is watched before it is captured, and guarded from then on.

As in `hocket.schedule` (`hocket.pystate`), but with no way back to the user's own step: all ranks run parts of
it. So a step that writes Python state, or asks a clock, is refused by name; and a call before which something that the
step reads has changed is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.errors import CaptureError, StaleCaptureError
from hocket.pystate.guards import Guards
from hocket.pystate.watch import MAX_WATCHED, PurityWatch, in_words, named
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.signature import signature_of
from hocket.tracing.state import inventory

__all__ = ["StepGuard"]

# Where `signature_of` says which gradients are there: the step drops those that it finds.
GRADIENTS = 5


class StepGuard:
    """Watches a step on one batch, whose effects on models and optimizers it undoes.

    Args:
        step: the user's own.
        model, optimizer: what it trains, each one or a list.
        batch: what it is called with.

    Raises:
        CaptureError: it writes or asks something that its graph would not.
    """

    def __init__(self, step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any) -> None:
        places = inventory(model, optimizer)
        self._watch = PurityWatch(step, (*places.models, *places.optimizers))
        self._guards: Guards | None = None
        saved = Saved(places, [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)])
        try:
            self._run(step, batch)
        finally:
            saved.restore()
        if self._watch.outputs:
            raise CaptureError(f"distribute: the step sets {self._watch.outputs[0].name}, and its parts would not")
        if self._watch.executed.calls_sinks:
            raise CaptureError("distribute: the step calls a sink; return what is to be shown")
        if self._watch.appended:
            raise CaptureError("distribute: the step appends to a list; return what is to be kept")

    def begin(self) -> None:
        """From now on everything that the step reads stays as it is."""
        self._guards = Guards(self._watch.look(), self._watch)

    def check_call(self, captured: Captured, batch: Any) -> None:
        """Return if a call with this batch is like the one that was captured, and what the step reads is as it was.

        Raises:
            StaleCaptureError: it is not; nothing was run.
        """
        found, expected = signature_of(captured.trace.places, batch), captured.signature
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            if place == GRADIENTS:
                one, other = ([requires for requires, _ in each] for each in (one, other))
            if one != other:
                raise StaleCaptureError(
                    "distribute: this call is not like the first one (shape or dtype of the batch, a value in it, a "
                    "module's mode, autocast); all steps of a job are"
                )
        self.check()

    def check(self) -> None:
        """Return if what the step reads is as it was.

        Raises:
            StaleCaptureError: it is not; names what changed.
        """
        assert self._guards is not None
        if not self._guards.hold() and not self._guards.renew() and (changes := self._guards.changes()):
            raise StaleCaptureError(f"distribute: {named(changes)} changed since the first call; nothing was run")

    def _run(self, step: Callable[[Any], Any], batch: Any) -> None:
        for _ in range(MAX_WATCHED):
            seen = self._watch.run(step, batch)
            if seen.before is not None and seen.findings:
                raise CaptureError(f"distribute: the step cannot be divided: {in_words(seen.findings)}")
            if seen.settled:
                return
        raise CaptureError(f"distribute: the step ran code for the first time in each of {MAX_WATCHED} steps")
