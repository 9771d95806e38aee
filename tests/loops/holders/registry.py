"""The tables of holders, and the decorators that add to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Made = tuple[Callable[[], Any], Callable[[Any], None]]
HOLDERS: dict[str, Callable[[Any], Made]] = {}
NUMBERS: dict[str, Callable[[Any], Made]] = {}
KEPT: list[Any] = []  # what has to outlive a loop


def holder(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    HOLDERS[make.__name__] = make
    return make


def number(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    NUMBERS[make.__name__] = make
    return make
