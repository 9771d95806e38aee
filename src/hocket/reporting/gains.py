"""Where the time between an eager and a planned step went, as a waterfall, and what else was tried.

Up to four kinds of steps are measured, and each difference is one gain::

    eager      [ Python | dispatch | ops ........................ ]
    serial     [ the same ops as native code, one after another ]      less Python and dispatch, memory is kept
    in form    [ the ops of the chosen form ............ ]             other kernels
    planned    [ the same ops on lanes ...... ]                        order, widths, ops side by side

How much of the first difference is Python, and how much is dispatch, is estimated from a record of eager's step. The
rest of it is what kept memory and shorter calls of the kernels are worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """A part of the difference between eager and planned, in milliseconds. It is negative if time was lost."""

    name: str
    saved_ms: float
    is_estimate: bool
    note: str


@dataclass(frozen=True)
class Attempt:
    """A form or a plan that a search tried.

    Attributes:
        form: name of the form, empty for the only one.
        planner: made the plan, empty if the form was left out before.
        duration_ms: lower quartile of its steps, or None if none was compared.
        outcome: kept, or why not.
    """

    form: str
    planner: str
    duration_ms: float | None
    outcome: str


def gains_of(
    *,
    eager_ms: float,
    planned_ms: float,
    serial_ms: float,
    in_form_ms: float | None = None,
    shares: Mapping[str, float] | None = None,
) -> tuple[Gain, ...]:
    """Return the gains, which add up to the difference.

    Args:
        eager_ms: lower quartile of eager's steps.
        planned_ms: that of the planned steps.
        serial_ms: that of eager's ops as native code, one after another.
        in_form_ms: the same of the plan's form, if it is another one.
        shares: of eager's time, by row of its record (``Python``, ``dispatch``).

    Example:
        >>> [(gain.name, gain.saved_ms) for gain in gains_of(eager_ms=8.0, serial_ms=5.0, planned_ms=4.0)]
        [('Python, dispatch and memory', 3.0), ('order and lanes', 1.0)]
    """
    before_ms = serial_ms if in_form_ms is None else in_form_ms
    lanes = Gain("order and lanes", before_ms - planned_ms, False, "ops side by side, at other widths")
    forms = [] if in_form_ms is None else [Gain("form", serial_ms - in_form_ms, False, "other kernels and fewer ops")]
    first_ms = eager_ms - serial_ms
    if not shares:
        first = [Gain("Python, dispatch and memory", first_ms, False, "the same ops, as native code on kept memory")]
    else:
        python_ms, dispatch_ms = shares["Python"] * eager_ms, shares["dispatch"] * eager_ms
        first = [
            Gain("Python", python_ms, True, "by the record of eager's step"),
            Gain("autograd and dispatch", dispatch_ms, True, "by the record of eager's step"),
            Gain("kept memory, direct calls", first_ms - python_ms - dispatch_ms, True, "the rest of eager's own time"),
        ]
    return (*first, *forms, lanes)


def waterfall(gains: Sequence[Gain], eager_ms: float) -> list[tuple[float, float]]:
    """Return the times between which the bar of each gain lies, in milliseconds.

    Example:
        >>> waterfall(gains_of(eager_ms=8.0, serial_ms=5.0, planned_ms=4.0), 8.0)
        [(5.0, 8.0), (4.0, 5.0)]
    """
    levels = list(itertools.accumulate((-gain.saved_ms for gain in gains), initial=eager_ms))
    return [(min(pair), max(pair)) for pair in itertools.pairwise(levels)]
