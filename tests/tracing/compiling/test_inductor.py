"""Decompositions of the compiled form compute in float64 what torch's kernels do, digit by digit."""

from typing import Any

import pytest
import torch

from hocket.tracing.compiling.inductor import decompositions

aten = torch.ops.aten


def given(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Ops whose kernels have constants of their own, by name, with arguments at which these matter."""
    torch.manual_seed(0)
    wide, gradient = torch.randn(400, dtype=dtype) * 4, torch.randn(400, dtype=dtype)
    chance, target, weight = torch.rand(3, 400, dtype=dtype)
    sure = torch.cat([chance[:200], chance[200:] * 1e-12])
    backward = aten.binary_cross_entropy_backward.default
    return {
        "binary cross entropy, mean": (backward, (gradient[0], sure, target)),
        "binary cross entropy, weighted": (backward, (gradient[0], sure, target, weight, 2)),
        "binary cross entropy, elements": (backward, (gradient, sure, target, None, 0)),
        "hardsigmoid backward": (aten.hardsigmoid_backward.default, (gradient, wide)),
        "hardsigmoid": (aten.hardsigmoid.default, (wide,)),
        "hardswish": (aten.hardswish.default, (wide,)),
        "hardswish backward": (aten.hardswish_backward.default, (gradient, wide)),
        "gelu backward": (aten.gelu_backward.default, (gradient, wide)),
        "mish backward": (aten.mish_backward.default, (gradient, wide)),
        "elu backward": (aten.elu_backward.default, (gradient, 1.0, 1.0, 1.0, False, wide)),
        "softplus backward": (aten.softplus_backward.default, (gradient, wide, 1, 20)),
        "huber backward": (aten.huber_loss_backward.default, (gradient, wide, target, 0, 1.0)),
        "logit backward": (aten.logit_backward.default, (gradient, chance)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", given(torch.float64))
def test_they_have_the_constants_of_the_kernels(name: str, dtype: torch.dtype) -> None:
    func, args = given(dtype)[name]
    expected, found = func(*args), decompositions()[func](*args)
    gap, scale = (found - expected).abs().max(), expected.abs().max()
    assert gap <= 16 * torch.finfo(dtype).eps * scale
    assert found.dtype is dtype
