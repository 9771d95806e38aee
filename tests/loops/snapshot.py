"""Values as flat tables from names to leaves, and the difference of two such tables by name."""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

# Relative to the largest value of a tensor, where the plan may use another number of threads than eager does.
TOLERANCE = 1e-4

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_KNOWN = ("builtins", "torch")


def flat(value: Any, name: str, into: dict[str, Any]) -> dict[str, Any]:
    """Add `value` to the table, leaf by leaf; tensors and arrays are copied.

    Raises:
        TypeError: a leaf of a kind that is not known here, and that would therefore never differ.
    """
    if isinstance(value, torch.Tensor):
        into[name] = value.detach().clone()
    elif isinstance(value, (np.ndarray, np.generic)):
        into[name] = np.array(value)
    elif isinstance(value, _PLAIN):
        # A number of a class of the library's own, left behind by a trace, may refuse to be printed.
        into[name] = value if type(value).__module__ in _KNOWN else f"a number of class {type(value).__name__}"
    elif isinstance(value, Mapping):
        into[f"keys of {name}"] = sorted(map(str, value))
        for key, item in value.items():
            flat(item, f"{name}[{key!r}]", into)
    elif isinstance(value, (list, tuple, deque)):
        into[f"kind and length of {name}"] = (type(value).__name__, len(value))
        for place, item in enumerate(value):
            flat(item, f"{name}[{place}]", into)
    elif isinstance(value, Set):
        into[name] = sorted(map(repr, value))
    elif isinstance(value, random.Random):
        into[name] = value.getstate()
    elif isinstance(value, np.random.Generator):
        into[name] = repr(value.bit_generator.state)
    elif isinstance(value, torch.Generator):
        into[name] = value.get_state()
    elif isinstance(value, BaseException):
        into[name] = f"raised {type(value).__name__}: {value}"
    elif is_dataclass(value):
        for field in fields(value):
            flat(getattr(value, field.name), f"{name}.{field.name}", into)
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, which cannot be compared")
    return into


def trained(model: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters with gradients, buffers and optimizer state, by name."""
    into: dict[str, Any] = {}
    for number, module in enumerate(_listed(model)):
        for name, parameter in module.named_parameters():
            flat(parameter, f"model {number}: {name}", into)
            flat(parameter.requires_grad, f"model {number}: {name}.requires_grad", into)
            flat(parameter.grad, f"model {number}: {name}.grad", into)
        for name, buffer in module.named_buffers():
            flat(buffer, f"model {number}: buffer {name}", into)
        flat([part.training for part in module.modules()], f"model {number}: training", into)
    for number, made in enumerate(_listed(optimizer)):
        flat(made.state_dict(), f"optimizer {number}", into)
    return into


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, exact: bool = True, smallest: float = 1e-7
) -> list[str]:
    """One line for each name whose values differ, and for each name that only one table has.

    Unless `exact`, tensors may differ by a share of their largest value, or of `smallest`.
    """
    lines = [f"{name}: only eager has it" for name in first if name not in second]
    lines += [f"{name}: only the scheduled run has it" for name in second if name not in first]
    for name in first:
        if name in second and not _same(first[name], second[name], exact, smallest):
            lines.append(f"{name}: {_difference(first[name], second[name])}")
    return lines


def fingerprint(table: Mapping[str, Any]) -> dict[str, int]:
    """A number for each leaf."""
    return {name: zlib.crc32(_bits(leaf)) for name, leaf in table.items()}


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _bits(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return repr((leaf.dtype, leaf.shape)).encode() + _bytes(leaf)
    if isinstance(leaf, np.ndarray):
        return repr((leaf.dtype, leaf.shape)).encode() + leaf.tobytes()
    return repr(leaf).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _same(a: Any, b: Any, exact: bool, smallest: float) -> bool:
    if type(a) is not type(b):
        return False
    if exact or not isinstance(a, (torch.Tensor, float)):
        return _bits(a) == _bits(b)
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-7) or (a != a and b != b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(torch.view_as_real(a), torch.view_as_real(b)) if a.is_complex() else torch.equal(a, b))
    finite = a.double()[a.isfinite()]
    scale = max(float(finite.abs().max()), smallest) if finite.numel() else 1.0
    return torch.allclose(a.double(), b.double(), rtol=0, atol=TOLERANCE * scale, equal_nan=True)


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        gap = (a.double() - b.double()).abs().max() if a.numel() else 0.0
        return f"differs by up to {float(gap):.3g}" + (f" (eager has {_short(a)})" if a.numel() == 1 else "")
    return f"eager has {_short(a)}, the scheduled run {_short(b)}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of {value.dtype}, {tuple(value.shape)}"
    text = str(value)
    return text if len(text) < 120 else f"{text[:80]} ... {text[-30:]}"
