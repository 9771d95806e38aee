"""Comparisons of plans that a given plan wins; the others run once all the same, so that they could leave a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.fusion import choose
from hocket.fusion.plan import ExecutionPlan

ALL = "all"  # all models at a time


def name_of(plan: ExecutionPlan, num_models: int) -> str:
    """The plan's own name, or `ALL`."""
    return ALL if plan.group_size == num_models > 1 else str(plan)


def prefer(monkeypatch: pytest.MonkeyPatch, step: str = ALL, forward: str = ALL) -> None:
    """Let one plan win of `array.losses`, and one of ``array(x)``; where it is not there, the first one wins."""

    def in_turns(racing: dict[ExecutionPlan, Callable[[], None]], *_: Any) -> dict[ExecutionPlan, float]:
        size = max(plan.group_size for plan in racing)
        of_losses = any(plan.per_group_backward for plan in racing)
        wanted = {step} if of_losses else {forward, step} if size == 1 else {forward}
        return {
            plan: 1.0 if name_of(plan, size) in wanted else 2 * choose.DISTURBED + place
            for place, plan in enumerate(racing)
        }

    monkeypatch.setattr(choose, "_in_turns", in_turns)
    monkeypatch.setattr(choose, "LARGE_S", float("inf"))  # however slow the machine is


def winner(array: Any, place: int = -1) -> str:
    """What was chosen last."""
    return name_of(array.choices[place].winner, array.num_models)


def winners(array: Any) -> list[str]:
    """Everything that was chosen."""
    return [winner(array, place) for place in range(len(array.choices))]


def in_one_go(array: Any) -> bool:
    """Whether the last choice was to go forward and backward in one go."""
    return bool(array.choices[-1].winner.per_group_backward)


def ways(*, images: bool) -> list[str]:
    """All that may win of `array.losses`."""
    found = [ALL, "1 at a time with backward"]
    return [*found, "1 at a time with backward, channels last"] if images else found
