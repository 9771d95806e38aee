"""Comparison of what plain and fused models of one program computed and left behind."""

from __future__ import annotations

import collections
import collections.abc
import types
from typing import Any

import torch
from torch import Tensor, nn

RTOL, ATOL = 1e-4, 1e-5


def difference(plain: dict[str, Any], fused: dict[str, Any], only_kinds: bool, is_loose: bool) -> str:
    """The first difference of two records, in words. A gradient of zeros is as good as none."""
    rtol, atol = (5e-2, 5e-2) if is_loose else (RTOL, ATOL)
    has_outputs = any(name.startswith("output") for name in fused)
    for name in dict.fromkeys((*plain, *fused)):
        if name.startswith("output") and not has_outputs:
            continue
        one, other = plain.get(name), fused.get(name)
        if one is None or other is None:
            there = other if one is None else one
            if name.startswith("gradient") and (only_kinds or not there.any()):
                continue
            return f"{name}: only in one of the two"
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return f"{name}: {one!r} plain, {other!r} fused"
        kinds = [(tuple(each.shape), each.dtype, each.device) for each in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{name}: {kinds[0]} plain, {kinds[1]} fused"
        if not only_kinds and not _is_close(one, other, rtol, atol):
            return f"{name}: off by {(one.double() - other.double()).abs().max().item():.3g}"
    return ""


def _is_close(one: Tensor, other: Tensor, rtol: float, atol: float) -> bool:
    """Relative to the largest element: what rounding does to one goes by the terms of a sum, not by the sum."""
    if torch.allclose(one, other, rtol, atol, equal_nan=True) or not one.is_floating_point():
        return torch.allclose(one, other, rtol, atol, equal_nan=True)
    return bool((one - other).abs().max() <= atol + rtol * one.abs().max())


def attributes(model: nn.Module) -> dict[str, Any]:
    """Attributes of the user's, of all layers, that are no tensors."""
    machinery = set(vars(nn.Module()))
    return {
        f"{name}.{key}": value
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if key not in machinery and not isinstance(value, Tensor)
    }


def unequal(one: Any, other: Any, depth: int = 0) -> str:
    """Name the first difference of plain values in two structures, empty if there is none."""
    if isinstance(one, Tensor) or depth > 8:
        return ""
    if type(one).__name__ != type(other).__name__:
        return f"{type(one).__name__} plain, {type(other).__name__} fused"
    if isinstance(one, float):
        return "" if abs(one - other) <= 1e-3 or one != one else f"{one} plain, {other} fused"
    if one is None or isinstance(one, (bool, int, str)):
        return "" if one == other or "looks_" in str(one) else f"{one!r} plain, {other!r} fused"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(one, collections.abc.Mapping):
        if list(map(str, one)) != list(map(str, other)):
            return f"keys {list(one)} plain, {list(other)} fused"
        pairs = [
            (key, value, other_value) for (key, value), other_value in zip(one.items(), other.values(), strict=True)
        ]
    elif isinstance(one, (list, tuple, collections.deque)):
        if len(one) != len(other):
            return f"{len(one)} elements plain, {len(other)} fused"
        pairs = [(key, *pair) for key, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, types.FunctionType):
        pairs = [("()", one.__defaults__, other.__defaults__), ("(*)", one.__kwdefaults__, other.__kwdefaults__)]
        pairs.append(("", vars(one), vars(other)))
    elif isinstance(getattr(one, "__dict__", None), dict) and not isinstance(one, nn.Module):
        pairs = [("", vars(one), vars(other))]
    return next((f"{key}: {line}" for key, a, b in pairs if (line := unequal(a, b, depth + 1))), "")
