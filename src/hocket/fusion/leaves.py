"""A parameter of a template says of itself what the parameter of a plain model says.

It is a part of a stacked one, and so it has a node of autograd behind it, and its gradient is a part of another.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ASKED", "SaidOfLeaves", "as_leaf"]

_SAID = {"is_leaf": True, "grad_fn": None, "retains_grad": False, "output_nr": 0}
ASKED = frozenset((*_SAID, "grad"))


def as_leaf(tensor: Any, name: str) -> Any:
    """An attribute of a tensor as a leaf has it; `NotImplemented` for other tensors and attributes."""
    row = getattr(tensor, "_hocket_row", None) if name in ASKED else None
    if row is None:
        return NotImplemented
    if name != "grad":
        return _SAID[name]
    whole, index = row
    return None if whole.grad is None else whole.grad[index]


class SaidOfLeaves(TorchFunctionMode):
    """While this is open, parts of stacked parameters are leaves to whoever asks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__" and isinstance(args[0], Tensor):
            found = as_leaf(args[0], getattr(func.__self__, "__name__", ""))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))
