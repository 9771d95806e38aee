"""Steps that are split into parts, and run by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.arguments import packed
from hocket.pystate.cuts import BEFORE, StepParts
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.parts import split


def ways(step: Callable[..., Any], *args: Any) -> list[StepParts]:
    executed = ExecutedCode()
    with executed.watching():
        step(*args)
    return split(step, executed.lines)


def in_parts(parts: StepParts, *args: Any) -> Any:
    drawn, kept = parts.before(*args) if parts.before is not None else ((), ())
    live = parts.middle(*args, **({BEFORE: drawn} if drawn else {}))
    return parts.end(packed(args, {}), kept, live)
