"""Ops that torch's batching computes: types under autocast, results that are shared, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import check, made
from torch import nn
from torch.nn import functional as F

import hocket
from fusion.rules.layers import Apply
from hocket.fusion import fallback
from hocket.fusion.rules import mapped
from hocket.fusion.stacked import Stacked

D = torch.float64


def known_to_autocast(name: str) -> list[str]:
    """Overloads of an op for which autocast has a kernel of its own, on any device."""
    packet, found = getattr(torch.ops.aten, name, None), []
    for overload in [] if packet is None else packet.overloads():
        full = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
        for key in ("AutocastCPU", "AutocastCUDA"):
            try:
                if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
                    found.append(f"{full} ({key})")
            except RuntimeError:  # an overload for TorchScript alone
                continue
    return found


@pytest.mark.parametrize("name", mapped.ANY_TYPE)
def test_autocast_knows_none_of_those_that_are_batched_under_it(name):
    assert known_to_autocast(name) == []


def test_autocast_knows_some_others():
    assert known_to_autocast("mse_loss")
    assert known_to_autocast("addmm")


FUNCTIONS = {
    "mse_loss": lambda x: F.mse_loss(x @ x.t(), torch.ones(5, 5)),
    "cross_entropy": lambda x: F.cross_entropy(x @ x.t(), torch.arange(5)),
    "addmm": lambda x: torch.addmm(x[0, :1], x, x.t()),
    "mean": lambda x: (x @ x.t()).mean(1),
    "amax": lambda x: (x @ x.t()).amax(1),
    "expand": lambda x: (x @ x.t())[:1].expand(3, -1),
    "softmax": lambda x: F.softmax(x @ x.t(), 1),
    "sum": lambda x: (x @ x.t()).sum(0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_under_autocast_are_the_plain_models(name):
    torch.manual_seed(0)
    models = [Apply(FUNCTIONS[name]) for _ in range(3)]
    array = hocket.fuse(models, backend="rule", shared=False, strict=True)
    x = torch.randn(3, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = array(x)
        for index, model in enumerate(models):
            expected = model(x[index])
            assert out.dtype == expected.dtype
            torch.testing.assert_close(out[index], expected, rtol=2e-2, atol=2e-2)


def test_numbers_without_axes_of_another_type_promote_as_in_one_model():
    def function(x):
        return F.mse_loss(x.float().mean(), x.sum(), reduction="none")

    check(made(lambda: Apply(function), 3), torch.randn(3, 5, 4, dtype=D), shared=False, strict=True)


@pytest.mark.parametrize("repeats", [2, torch.tensor([1, 0, 2, 1, 3])], ids=["number", "tensor"])
@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_repeats(repeats):
    x = torch.randn(3, 5, 4, dtype=D)
    check(made(lambda: Apply(lambda x: torch.repeat_interleave(x, repeats, 0)), 3), x, shared=False)


def test_a_failure_leaves_no_level_behind():
    x = Stacked(torch.randn(3, 5, 4))
    with pytest.raises(RuntimeError):
        fallback.batched(torch.Tensor.item, (x,), {}, 3)
    assert not torch._C._are_functorch_transforms_active()
    assert fallback.batched(torch.Tensor.t, (x,), {}, 3).shape == (4, 5)


def test_a_mistake_is_told_as_of_one_model():
    array = hocket.fuse([nn.Flatten(1, 7) for _ in range(2)], backend="rule", shared=False)
    with pytest.raises(hocket.errors.InputError, match="flatten"):
        array(torch.ones(2, 3, 4))
