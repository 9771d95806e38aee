"""Checks of single arguments of schedulers: each takes the argument's name and a value, and gives the value back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hocket.errors import InputError
from hocket.fusion.optim.hyper import is_number

__all__ = ["callable_", "number", "whole", "within"]


def number(name: str, value: Any) -> float:
    """Any finite number.

    Example:
        >>> number("gamma", "fast")
        Traceback (most recent call last):
        ...
        hocket.errors.InputError: gamma: expected a number, got 'fast'
    """
    if not is_number(value) or not math.isfinite(float(value)):
        raise InputError(f"{name}: expected a number, got {value!r}")
    return float(value)


def within(low: float, high: float = math.inf, open_above: bool = False) -> Callable[[str, Any], float]:
    """A check for a number between `low` and `high`."""

    def check(name: str, value: Any) -> float:
        found = number(name, value)
        if found < low or found > high or (open_above and found == high):
            upper = "" if high == math.inf else f" and {'<' if open_above else '<='} {high:g}"
            raise InputError(f"{name}: expected a number >= {low:g}{upper}, got {value!r}")
        return found

    return check


def whole(least: int) -> Callable[[str, Any], int]:
    """A check for a whole number of at least `least`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}: expected a whole number >= {least}, got {value!r}")
        return value

    return check


def callable_(name: str, value: Any) -> Callable[[int], float]:
    """Something that is called with an epoch."""
    if not callable(value):
        raise InputError(f"{name}: expected a function of the epoch, got {value!r}")
    return value
