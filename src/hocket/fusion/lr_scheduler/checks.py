"""Checks of single arguments of schedulers, by the argument's name: each gives the value back, or raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hocket.errors import InputError
from hocket.fusion.optim.hyper import check_whole, is_number, one_of

__all__ = ["checked"]

Check = Callable[[str, Any], Any]


def checked(kind: str, name: str, value: Any) -> Any:
    """An argument of one scheduler of class `kind`, as torch takes it; None, for a default, as it stands.

    Raises:
        InputError: the value is of another type or out of bounds.

    Example:
        >>> checked("StepLR", "gamma", 1)
        1.0
        >>> checked("StepLR", "gamma", "fast")
        Traceback (most recent call last):
        ...
        hocket.errors.InputError: gamma: expected a number, got 'fast'
    """
    check = CHECKS.get(f"{kind}.{name}") or CHECKS[name]
    return value if value is None and name in OPTIONAL else check(name, value)


def _number(name: str, value: Any) -> float:
    if not is_number(value) or not math.isfinite(float(value)):
        raise InputError(f"{name}: expected a number, got {value!r}")
    return float(value)


def _within(low: float, high: float = math.inf, *, is_open: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        found = _number(name, value)
        if found < low or found > high or (is_open and found == high):
            upper = "" if high == math.inf else f" and {'<' if is_open else '<='} {high:g}"
            raise InputError(f"{name}: expected a number >= {low:g}{upper}, got {value!r}")
        return found

    return check


def _whole(least: int) -> Check:
    return lambda name, value: check_whole(name, value, least)


def _word(*known: str) -> Check:
    return lambda name, value: one_of(name, value, known)


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise InputError(f"{name}: expected a function of the epoch, got {value!r}")
    return value


def _epochs(name: str, value: Any) -> list[int]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise InputError(f"{name}: expected epochs in a list, got {value!r}")
    return [check_whole(name, epoch, 0) for epoch in value]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name}: expected True or False, got {value!r}")
    return value


OPTIONAL = ("total_steps", "epochs", "steps_per_epoch", "step_size_down", "scale_fn")
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("step_size", "T_max", "T_0", "T_mult", "total_steps", "epochs", "steps_per_epoch"), _whole(1)),
    **dict.fromkeys(("step_size_up", "step_size_down"), _whole(1)),
    **dict.fromkeys(("total_iters", "patience", "cooldown"), _whole(0)),
    **dict.fromkeys(("gamma", "eta_min", "power", "base_momentum", "max_momentum", "threshold"), _number),
    **dict.fromkeys(("min_lr", "eps"), _number),
    **dict.fromkeys(("base_lr", "max_lr"), _within(0)),
    **dict.fromkeys(("pct_start", "start_factor", "end_factor"), _within(0, 1)),
    **dict.fromkeys(("div_factor", "final_div_factor"), _within(1e-300)),
    **dict.fromkeys(("cycle_momentum", "three_phase"), _flag),
    **dict.fromkeys(("lr_lambda", "scale_fn"), _function),
    "milestones": _epochs,
    "factor": _within(0, 1),
    "ReduceLROnPlateau.factor": _within(0, 1, is_open=True),
    "ReduceLROnPlateau.mode": _word("min", "max"),
    "CyclicLR.mode": _word("triangular", "triangular2", "exp_range"),
    "anneal_strategy": _word("cos", "linear"),
    "threshold_mode": _word("rel", "abs"),
    "scale_mode": _word("cycle", "iterations"),
}
