"""Ops along one axis or several: the same op, the axes moved by one. Without an axis all but the model axis is reduced.

softmax(x, -1)  ->  softmax(x, -1)         sum(x, (0, 1))  ->  sum(x, (1, 2))         sum(x)  ->  sum(x, (1, 2, ...))

Ops of `mapped` need no such rule. Autocast knows the ops here, and has to see them as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.mapped import mapped
from hocket.fusion.rules.pointwise import pointwise
from hocket.fusion.stacked import Stacked, is_stacked

SOFTMAX = ("softmax", "_softmax", "log_softmax", "softmin", "cumsum", "cumprod")
AXIS = {**dict.fromkeys((*SOFTMAX, "sum", "prod", "logsumexp"), 1), "norm": 2, "normalize": 2}  # among the arguments


def shifted(axes: Any) -> Any:
    """An axis, or several, where the models' axis stands first."""
    if isinstance(axes, (tuple, list)):
        return type(axes)(shifted(axis) for axis in axes)
    return axes + 1 if axes >= 0 else axes


@rule(*AXIS)
def along(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Any of `AXIS`."""
    if input.ndim == 0 or is_stacked((args, kwargs)):  # its axis -1 would be the models'
        return NotImplemented
    given, place = [input.tensor, *args], AXIS[context.name]
    keyword = "axis" if "axis" in kwargs else "dim"
    axes = given[place] if len(given) > place else kwargs.get(keyword, 1 if context.name == "normalize" else None)
    if axes is None or axes in ((), []):
        if context.name not in ("sum", "prod") or len(given) > 1 or kwargs.get("keepdim"):
            return NotImplemented
        everything = getattr(torch, context.name)  # of aten's op another overload has an axis
        return Stacked(everything(input.tensor.flatten(1), 1, **{key: kwargs[key] for key in kwargs if key != keyword}))
    if len(given) > place:
        given[place] = shifted(axes)
    else:
        kwargs = {**kwargs, keyword: shifted(axes)}
    return Stacked(context.target(*given, **kwargs))


@rule("max", "min")
def extreme(context: OpContext, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Along an axis, over everything, or of two values, element by element."""
    of_two = (args and isinstance(args[0], (Stacked, Tensor))) or "other" in kwargs
    return (pointwise if of_two else mapped)(context, input, *args, **kwargs)
