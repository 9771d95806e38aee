"""Hyper-parameters: one number for all models, or one for each.

A number that all models share stays a Python float, as torch keeps it. One that differs is a `PerModel`: a float64
tensor of shape (B,) in the parameter group, on the device of the group's parameters. A step never reads it back into
Python, so it needs no synchronisation, a captured step follows it like any other tensor, and a scheduler writes it in
place::

    lr=0.1                group["lr"] = 0.1                      p.add_(g, alpha=-0.1)
    lr=[0.1, 0.2, 0.3]    group["lr"] = PerModel([0.1, ...])     p.addcmul_(g, -lr.view(3, 1, 1))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.errors import InputError


class PerModel(torch.Tensor):
    """One number for each model: float64, of shape (B,).

    Arithmetic gives plain tensors. torch's own schedulers set a rate by `fill_`, which takes B numbers here.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fill_(self, value: Any) -> torch.Tensor:
        """Set one number for all models, or one for each."""
        if isinstance(value, torch.Tensor):
            return self.copy_(value)
        return super().fill_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerModel:
        if id(self) not in memo:
            memo[id(self)] = plain(self).clone().as_subclass(PerModel)
        return memo[id(self)]


Number = float | torch.Tensor


def plain(value: Any) -> Any:
    """A `PerModel` as the tensor that it is, sharing its memory, or anything else as it stands."""
    return value.as_subclass(torch.Tensor) if isinstance(value, PerModel) else value


@dataclass(frozen=True)
class Bound:
    """Bounds of a hyper-parameter: ``low <= x``, and below `high` (or at most, if `closed`)."""

    low: float = 0.0
    high: float = math.inf
    closed: bool = False

    @property
    def range(self) -> str:
        """Text of the bound for error messages. Empty if unbounded."""
        upper = "" if self.high == math.inf else f" and {'<=' if self.closed else '<'} {self.high:g}"
        return f" >= {self.low:g}{upper}" if self.low > -math.inf else ""

    def __str__(self) -> str:
        return f"numbers{self.range}" if self.range else "finite numbers"

    def holds(self, value: float) -> bool:
        """True if `value` lies within. No NaN does."""
        # Comparisons alone: a captured step follows a number that changes as long as they come out alike.
        above = self.low <= value if self.low > -math.inf else value > -math.inf
        return bool(above and (value <= self.high if self.closed else value < self.high))


def numbers(*names: str) -> dict[str, Bound]:
    """Hyper-parameters that are at least 0."""
    return dict.fromkeys(names, Bound())


def is_number(value: Any) -> bool:
    """True if `value` is a real number, of Python, numpy or a tensor of no dimension, and no truth value."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    if isinstance(value, (bool, str, bytes, list, tuple, complex)) or getattr(value, "shape", ()) != ():
        return False
    return hasattr(value, "__float__") and getattr(value, "dtype", None) not in ("bool", "complex64", "complex128")


def is_row(value: Any) -> bool:
    """True if `value` is a row: a list, a tuple, a tensor or an array of one dimension."""
    return isinstance(value, (list, tuple)) or len(getattr(value, "shape", ())) == 1


def numbers_of(name: str, value: Any, num_models: int, bound: Bound) -> float | list[float]:
    """`value` as one number or as one for each model."""
    if is_number(value):
        number: float = value if isinstance(value, int) else float(value)  # momentum=0 prints as 0, as in torch
        if not bound.holds(number):
            raise InputError(f"{name}: expected {bound}, got {value!r}")
        return number
    found = row(name, value, num_models)
    for model, element in enumerate(found):
        given = float(element) if type(element) is float or is_number(element) else element
        if not isinstance(given, float) or not bound.holds(given):
            raise InputError(f"{name}: expected {bound}, got {given!r} for model {model} in {_shown(value)}")
    return [float(element) for element in found]


def row(name: str, value: Any, num_models: int, what: str = "a number") -> list[Any]:
    """`value`, a row with one element for each model, as a list."""
    if not is_row(value):
        raise InputError(f"{name}: expected {what}, or {num_models} in a list, one for each model, got {value!r}")
    found = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(found) != num_models:
        raise InputError(
            f"{name}: expected {num_models} {what.removeprefix('a ')}s, one for each model, or one for all, "
            f"got {len(found)}: {_shown(value)}"
        )
    return found


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """`value`, which must be one of the words `known`."""
    if value not in known:
        raise InputError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def check_whole(name: str, value: Any, least: int) -> int:
    """`value`, which must be a whole number of at least `least`, of Python, numpy or torch."""
    is_whole = hasattr(value, "__index__") and is_number(value) and float(value) == int(value)
    if not is_whole or value < least:
        raise InputError(f"{name}: expected a whole number >= {least}, got {value!r}")
    return int(value)


def per_model(values: Sequence[float] | torch.Tensor, device: torch.device | str = "cpu") -> PerModel:
    """These B numbers as a `PerModel`."""
    return torch.as_tensor(values, dtype=torch.float64).to(device, copy=True).as_subclass(PerModel)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The numbers of an option: one, or two of ``betas``."""
    return value if type(value) is tuple else (value,)


def by_model(value: Any, num_models: int) -> list[Any]:
    """An option of a group as that of each model, a pair of betas as pairs."""
    if type(value) is tuple:
        return list(zip(*(by_model(part, num_models) for part in value), strict=True))
    if isinstance(value, torch.Tensor):
        return [value.item()] * num_models if value.dim() == 0 else value.tolist()
    return list(value) if isinstance(value, list) else [value] * num_models


def of_model(value: Any, model: int) -> Any:
    """An option of a group as that of one model."""
    if type(value) is tuple:
        return tuple(of_model(part, model) for part in value)
    if isinstance(value, torch.Tensor):
        return value[model].item() if value.dim() else value.item()
    return value[model] if isinstance(value, list) else value


def from_models(values: Sequence[Any]) -> Any:
    """The inverse of `by_model`: a row, or for pairs a pair of rows."""
    return tuple(map(list, zip(*values, strict=True))) if type(values[0]) is tuple else list(values)


def _shown(value: Any) -> str:
    return repr(value.tolist() if hasattr(value, "tolist") else value)
