"""Steps that are split into parts, and run by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.arguments import packed, unpacked
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.parts import split
from hocket.pystate.step_parts import StepParts, is_end


def ways(step: Callable[..., Any], *args: Any) -> list[StepParts]:
    executed = ExecutedCode()
    with executed.watching():
        step(*args)
    return split(step, executed.lines)


def in_parts(parts: StepParts, *args: Any) -> Any:
    batch = packed(args, {})
    own, kept = parts.begin(batch)
    if is_end(kept):
        return own
    given, named = unpacked(own)
    return parts.end(batch, kept, parts.middle(*given, **named))
