"""Plans that arrays run by in tests, whatever is faster on this machine."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.fusion import calls
from hocket.fusion.contest import ExecutionPlan, plans_for

ALL = "all"  # all models at a time


def name_of(plan: ExecutionPlan, num_models: int) -> str:
    """The plan's own name, or `ALL`."""
    return ALL if plan.group_size == num_models > 1 else str(plan)


def prefer(monkeypatch: pytest.MonkeyPatch, step: str = ALL, forward: str = ALL) -> None:
    """Let calls of ``array.losses`` and of ``array(x)`` have one plan each; the usual one if it is not there.

    The first call of a kind runs the plain models, so it is the second one that goes by the plan.
    """

    def wanted(num_models: int, *, with_losses: bool, has_images: bool) -> list[ExecutionPlan]:
        plans = plans_for(num_models, with_losses=with_losses, has_images=has_images)
        names = {step} if with_losses else {forward, step} if num_models == 1 else {forward}
        return [plan for plan in plans if name_of(plan, num_models) in names] or plans[:1]

    monkeypatch.setattr(calls, "plans_for", wanted)


def winner(array: Any, place: int = -1) -> str:
    """The last choice."""
    return name_of(array.choices[place].winner, array.num_models)


def winners(array: Any) -> list[str]:
    """Everything that was chosen."""
    return [winner(array, place) for place in range(len(array.choices))]


def in_one_go(array: Any) -> bool:
    """True if the last choice was to go forward and backward in one go."""
    return bool(array.choices[-1].winner.per_group_backward)


def ways(*, images: bool) -> list[str]:
    """All that may win of `array.losses`."""
    found = [ALL, "1 at a time with backward"]
    return [*found, "1 at a time with backward, channels last"] if images else found
