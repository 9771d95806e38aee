"""Ops taken apart into simpler ones, as torch's kernels compute them. Used in the compiling process only.

Inductor's own table has two constants as they are written in a paper, where the kernels have them as C++ floats: 1e-12
in the backward of a binary cross entropy, and a sixth in that of a hard sigmoid. In float32 that is the same. In
float64 a step is 4e-9 and 3e-8 off, more than a compiled form may be. The first shows where a network is so sure that
a probability of less than 1e-12 is left: in a GAN often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_EPSILON = float(torch.tensor(1e-12, dtype=torch.float32))
_SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))
# Values of an op's argument `reduction`.
_MEAN = 1


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions, with the constants of torch's kernels."""
    from torch._inductor.decomposition import select_decomp_table

    return {
        **select_decomp_table(),
        _aten.binary_cross_entropy_backward.default: _binary_cross_entropy_backward,
        _aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    }


def _binary_cross_entropy_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> torch.Tensor:
    result = gradient * (x - target) / torch.clamp(x * (1 - x), min=_EPSILON)
    if weight is not None:
        result = result * weight
    return result / x.numel() if reduction == _MEAN else result


def _hardsigmoid_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where((x > -3.0) & (x < 3.0), gradient * _SIXTH, 0.0)
