"""Requests of a tuner, one at a time. A tuner never sees a batch or a result.

A variant of a schedule carries out each item on the user's real step and sends back an observation, see
`Tuner.search`::

    tuner    WatchedStep  RecordedStep  VerifiedStep  SampledForms  TimedStep ...        Decision
               |   ^         |   ^         |   ^        |   ^         |   ^
    variant    step purity   step graph    two steps    distances     step milliseconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hocket.execution.base import Executor
from hocket.tracing.captured import Captured


@dataclass(frozen=True)
class WatchedStep:
    """An ordinary step, watched. Back comes what it showed, a `hocket.pystate.watch.Watched`."""

    stage: ClassVar[str] = "watch"


@dataclass(frozen=True)
class RecordedStep:
    """An ordinary step in this form, recorded. Back comes a `hocket.autotune.recording.RecordedForm`."""

    stage: ClassVar[str] = "capture"

    form: str


@dataclass(frozen=True, eq=False)
class VerifiedStep:
    """An ordinary step, and from the same state the same by `executor`. Back comes a `Difference`."""

    stage: ClassVar[str] = "verify"

    form: str
    executor: Executor


@dataclass(frozen=True, eq=False)
class SampledForms:
    """An ordinary step, after the same step in float64, by `plain` and by each of `forms`, all from the same state.

    The answer holds for each form a sample of its distances, or the error (see `hocket.autotune.closeness`).
    """

    stage: ClassVar[str] = "verify"

    captured: Captured
    plain: Executor
    forms: Mapping[str, Executor]
    number: int


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step by `executor` in this form, or an ordinary one. Back come its milliseconds."""

    executor: Executor | None = None
    stage: str = "compare"
    form: str = ""


Item = WatchedStep | RecordedStep | VerifiedStep | SampledForms | TimedStep
