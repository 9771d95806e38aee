"""How each op is computed for all models at once, one family a file."""

from __future__ import annotations

from hocket.fusion.rules import (
    attention,
    conv,
    dropout,
    embedding,
    linear,
    mapped,
    norm,
    pointwise,
    random,
    recurrent,
    reduction,
    shape,
)
from hocket.fusion.rules.base import OpContext, Rule, find, find_module

__all__ = [
    "OpContext",
    "Rule",
    "attention",
    "conv",
    "dropout",
    "embedding",
    "find",
    "find_module",
    "linear",
    "mapped",
    "norm",
    "pointwise",
    "random",
    "recurrent",
    "reduction",
    "shape",
]
