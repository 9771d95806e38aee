"""Rules that compute each op for all models at once, one family a file."""

from __future__ import annotations

from hocket.fusion.rules import (  # noqa: F401  (each registers its rules)
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
from hocket.fusion.rules.base import OpContext, Rule, find

__all__ = ["OpContext", "Rule", "find"]
