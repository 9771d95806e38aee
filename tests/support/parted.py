"""Steps that are split into parts, and run by them."""

import contextlib
from collections.abc import Callable
from typing import Any

from hocket.arguments import packed, unpacked
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.parts import split
from hocket.pystate.step_parts import StepParts, is_end


def ways(step: Callable[..., Any], *args: Any) -> list[StepParts]:
    """The parts of a step that has run, perhaps up to a name that is not bound."""
    executed = ExecutedCode()
    with executed.watching(), contextlib.suppress(UnboundLocalError):
        step(*args)
    return split(step, executed.lines)


def in_parts(parts: StepParts, *args: Any) -> Any:
    batch = packed(args, {})
    own, kept = parts.begin(batch)
    if is_end(kept):
        return own
    given, named = unpacked(own)
    return parts.end(batch, kept, parts.middle(*given, **named))
