"""Arguments of ATen calls as JSON: numbers, flags, names of dtypes, and references to values and to the tape.

``1.5`` and ``"mean"`` stand for themselves and a list for a list. ``{"value": 3}`` is a tensor, ``{"number": 0}`` a
number that changes between steps, ``{"dtype": "float32"}`` a constant of torch. Nothing else can be written or read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hocket.errors import CaptureError

# Constants of torch by the key of their text.
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encoded(value: Any, reference: Callable[[Any], dict[str, int] | None]) -> Any:
    """An argument as JSON. `reference` maps a leaf to the value or number that it refers to, or a constant to None."""
    found = reference(value)
    if found is not None:
        return found
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encoded(element, reference) for element in value]
    for key, kind in _KINDS.items():
        if isinstance(value, kind):
            return {key: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise CaptureError(f"an op is given a {type(value).__name__}, which is not compiled")


def decoded(text: Any, leaf: Callable[[str, int], Any]) -> Any:
    """Return the argument that a text encodes. A reference becomes ``leaf("value", 3)``."""
    if isinstance(text, list):
        return [decoded(element, leaf) for element in text]
    if not isinstance(text, dict):
        return text
    ((key, what),) = text.items()
    if key in ("value", "number"):
        return leaf(key, int(what))
    if key == "device":
        return torch.device(what)
    constant = getattr(torch, what, None)
    if key not in _KINDS or not isinstance(constant, _KINDS[key]):
        raise CaptureError(f"a compiled list holds the argument {text!r}")
    return constant


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without torch's."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    found: torch.dtype = decoded({"dtype": name}, lambda *_: None)
    return found


def op_text(func: Any) -> str:
    """The name of an op of the dispatcher."""
    if not isinstance(func, torch._ops.OpOverload):
        raise CaptureError(f"{func} is not an op of torch's dispatcher")
    return f"{func.namespace}.{func._schema.name.partition('::')[2]}.{func._overloadname}"


def op_named(text: str) -> Any:
    """The op of this name, or a `CaptureError` if this torch has none."""
    try:
        namespace, name, overload = text.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, ValueError):
        raise CaptureError(f"torch {torch.__version__} has no op {text}") from None
