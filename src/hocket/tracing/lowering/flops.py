"""Floating-point operations of an ATen op, from its shapes.

Matrix products, convolutions and attention by the formulas of `torch.utils.flop_counter`; everything else counts one
operation an output element, which is right within a small factor for what memory traffic decides anyway.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["flops"]


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Operations of ``func(*args, **kwargs) == result``; the tensors may be fake ones."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    return float(sum(math.prod(value.shape) for value in tree_iter(result) if hasattr(value, "shape")))
