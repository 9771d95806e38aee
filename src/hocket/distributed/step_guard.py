"""`StepGuard`: watch a step before its capture, and guard the Python state that it reads from then on.

`hocket.schedule` does the same (`hocket.pystate`), but falls back to the user's own step, which ranks that run parts of
it cannot do. So a step that writes Python state or reads a clock is refused by name, and so is a call before which
something that the step reads has changed.
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

# Index of the gradients in `signature_of`. Whether they exist does not matter, since the step drops them.
GRADIENTS = 5


class StepGuard:
    """Watches a step on one batch, and undoes its effects on models and optimizers.

    Raises:
        CaptureError: the step has an effect or an input that its graph would not have.
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
        """Guard everything that the step reads from now on."""
        self._guards = Guards(self._watch.look(), self._watch)

    def check_call(self, captured: Captured, batch: Any) -> None:
        """Return if a call is like the captured one, and the step reads the same values.

        Raises:
            StaleCaptureError: something differs, and nothing was run.
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
        """Return if the step reads the same values as in the first call.

        Raises:
            StaleCaptureError: a value has changed, which is named.
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
