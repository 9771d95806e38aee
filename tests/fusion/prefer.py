"""Contests that a given contender wins; the others run all the same, so that they could leave a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.fusion import choose, step_planner

Contest = Callable[[dict[str, Callable[[], None]]], dict[str, float]]


def won_by(name: str) -> Contest:
    def benchmark(contenders: dict[str, Callable[[], None]]) -> dict[str, float]:
        for run in contenders.values():
            run()
        return {each: 0.0 if each == name else 1.0 + place for place, each in enumerate(contenders)}

    return benchmark


def prefer(monkeypatch: pytest.MonkeyPatch, step: str = "whole", forward: str = "rule") -> None:
    """Let one of `step` win of `array.losses`, and one of `forward` of ``array(x)``."""
    monkeypatch.setattr(choose, "_choose_ops", lambda program, leaves: ({}, {}))
    monkeypatch.setattr(choose, "benchmark", won_by(forward))
    monkeypatch.setattr(step_planner, "benchmark", won_by(step))
    monkeypatch.setattr(step_planner, "LARGE_S", float("inf"))  # however slow the machine is


def in_one_go(array: Any) -> bool:
    """Whether the last choice was to go forward and backward in one go."""
    return "in one go" in array.choices[-1].winner


def ways(num_models: int, *, images: bool) -> list[str]:
    """All that may win of `array.losses`."""
    sizes = [size for size in range(num_models - 1, 0, -1) if num_models % size == 0]
    found = ["whole", *(f"{size} in one go" for size in sizes)]
    return [*found, "1 in one go, channels last"] if images else found
