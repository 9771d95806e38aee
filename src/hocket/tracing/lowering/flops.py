"""Floating-point operations of an ATen op, from its shapes.

Matrix products, convolutions and attention follow the formulas of `torch.utils.flop_counter`. Other ops count one
operation for each output element, which is right within a small factor for ops that memory traffic dominates.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["flops"]


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the operations of ``func(*args, **kwargs) == result``. The tensors may be fake."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    return float(sum(math.prod(value.shape) for value in tree_iter(result) if hasattr(value, "shape")))
