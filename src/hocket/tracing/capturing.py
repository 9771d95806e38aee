"""`capture_step`: a step captured by itself, outside of a schedule. Its effects are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.errors import CaptureError
from hocket.heap import trim_heap
from hocket.sinks import sinks_held
from hocket.tracing.captured import Captured, alone, captured_from
from hocket.tracing.reasons import Reasons
from hocket.tracing.recording.exits import exits_noted
from hocket.tracing.recording.record import record_step
from hocket.tracing.recording.trace import Recorded
from hocket.tracing.saved_state import Saved
from hocket.tracing.signature import signature_of
from hocket.tracing.sources import Entry, Gradient
from hocket.tracing.state import Inventory, inventory, leaf_of


def capture_step(
    step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any, *, split: bool = True, pays: Any = None
) -> Captured:
    """See `hocket.capture`."""
    places = inventory(model, optimizer)
    made: dict[Any, Any] = {}
    with alone():
        if _has_state(places):
            signature = signature_of(places, batch)
            recorded = _recorded(step, places, batch)
        else:
            # The optimizer makes its state in its first step. Let it, and take everything back afterwards.
            saved = Saved(places, [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)])
            try:
                with exits_noted(Reasons(raises=True)), sinks_held():
                    step(batch)
                signature = signature_of(places, batch)
                recorded = _recorded(step, places.again(), batch)
                for source in recorded.trace.sources.values() if recorded.trace else ():
                    if isinstance(source, (Entry, Gradient)) and source.kind in ("state", "gradient"):
                        made[source] = source.get().detach().clone()
            finally:
                saved.restore()
        if recorded.trace is None:
            raise CaptureError(str(recorded.reason))
        recorded.trace.tape.trusting = True  # there is no eager step to compare with
        found = captured_from(recorded.trace, signature, step, recorded.batch, split=split, pays=pays, made=made)
    trim_heap()
    return found


def _recorded(step: Callable[[Any], Any], places: Inventory, batch: Any) -> Recorded:
    try:
        recorded = record_step(step, places, batch, undoes=True)
        if recorded.leaves:
            leaves = [leaf_of(tensor, f"leaf{number}") for number, tensor in enumerate(recorded.leaves)]
            recorded = record_step(step, places.again(leaves), batch, undoes=True)
        return recorded
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the step raised while it was recorded: {type(error).__name__}: {error}") from error


def _has_state(places: Inventory) -> bool:
    """True if every optimizer has taken a step (one without any state, plain SGD, never shows it and need not)."""
    for optimizer in places.optimizers:
        if optimizer.state:
            continue
        stateless = type(optimizer) is torch.optim.SGD and not any(g["momentum"] for g in optimizer.param_groups)
        if not stateless:
            return False
    return True
