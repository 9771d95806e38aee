"""The options of a schedule: which values each of them may have."""

from __future__ import annotations

from typing import Any

from hocket.errors import InputError
from hocket.execution import EXECUTORS, unavailable_reason
from hocket.ir import Machine, Plan
from hocket.planning import planners

__all__ = ["NUMERICS", "check_options"]

# What a plan may compute: eager's bits, what another number of threads makes of them, or what is as close to the
# float64 step.
NUMERICS = ("bitwise", "rounding", "close")


def check_options(step: Any, machine: Machine, planner: str, plan: Any, numerics: str, executor: str) -> None:
    """Raise an `InputError` that names the argument of `hocket.schedule` which cannot be used."""
    if not callable(step):
        raise InputError(f"schedule: expected a step to call, got {type(step).__name__}")
    if plan is not None and (planner != "auto" or not isinstance(plan, Plan)):
        raise InputError("schedule: plan: expected a hocket.Plan and no planner beside it")
    known = {"planner": ("auto", *planners()), "numerics": NUMERICS, "executor": EXECUTORS}
    for option, given in (("planner", planner), ("numerics", numerics), ("executor", executor)):
        if given not in known[option]:
            raise InputError(f"schedule: unknown {option} {given!r}; available: {', '.join(known[option])}")
    for device in machine.devices:
        if problem := unavailable_reason(device):
            raise InputError(f"schedule: machine: {problem}")
