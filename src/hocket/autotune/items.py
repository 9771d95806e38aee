"""What a tuner asks for, one item at a time. No batch and no result enters a tuner.

A variant of a schedule makes each item on the user's real step and sends back what it showed; see `Tuner.search`::

    tuner    WatchedStep  VerifiedStep  SampledForms  TimedStep ...        Decision
               |   ^         |   ^        |   ^         |   ^
    variant    step purity   two steps    distances     step milliseconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hocket.autotune.compiling import FormCompiler
from hocket.execution.base import Executor
from hocket.tracing.captured import Captured

__all__ = ["CaptureRequest", "Item", "SampledForms", "TimedStep", "VerifiedStep", "WatchedStep"]


@dataclass(frozen=True)
class WatchedStep:
    """An ordinary step, watched. Back comes what it showed, a `hocket.tracing.purity.watch.Watched`."""

    stage: ClassVar[str] = "watch"


@dataclass(frozen=True)
class CaptureRequest:
    """A trace with the batch of the coming step, which is not made yet. Back comes form -> `Captured`.

    Where there is a `compiler`, compiled forms that are kept are among them; others are left to it.
    """

    stage: ClassVar[str] = "capture"

    compiler: FormCompiler | None = None


@dataclass(frozen=True, eq=False)
class VerifiedStep:
    """An ordinary step, and from the same state the same by `executor`. Back comes a `Difference`."""

    stage: ClassVar[str] = "verify"

    form: str
    captured: Captured
    executor: Executor


@dataclass(frozen=True, eq=False)
class SampledForms:
    """An ordinary step; before it, from the same state, the same in float64, by `plain` and by each of `forms`.

    Back comes by form a sample of its distances, or what it raised (see `hocket.autotune.closeness`).
    """

    stage: ClassVar[str] = "verify"

    captured: Captured
    plain: Executor
    forms: Mapping[str, Executor]
    number: int


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step by `executor`; an ordinary one where there is none. Back come its milliseconds."""

    executor: Executor | None = None
    stage: str = "compare"


Item = WatchedStep | CaptureRequest | VerifiedStep | SampledForms | TimedStep
