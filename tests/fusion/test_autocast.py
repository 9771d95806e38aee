"""Models under autocast, against plain models under autocast."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import pytest
import torch
from tests.fusion.nets import NETS
from tests.fusion.oracle import made
from torch import nn
from torch.nn import functional as F

import hocket


@cache
def has_bfloat16_lstm() -> bool:
    """Torch has none on a processor without AVX-512."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError as error:
            if "primitive descriptor" not in str(error):
                raise
            return False
    return True


def skip_without_lstm(name: str) -> None:
    if name == "words" and not has_bfloat16_lstm():
        pytest.skip("torch has no LSTM in bfloat16 on a CPU without AVX-512")


@pytest.mark.parametrize("backend", ["rule", "vmap", "loop", "auto"])
@pytest.mark.parametrize("name", NETS)
def test_under_autocast_outputs_are_those_of_single_models_under_autocast(name, backend):
    """On the CPU to bfloat16: the same types, and the same numbers to bfloat16's rounding.

    torch's vmap (2.13) adds a linear layer's bias in single precision: there the result has more digits than alone.
    """
    skip_without_lstm(name)
    make, given = NETS[name]
    models = [model.float() for model in made(make, 3)]
    x = given()
    x = x.float() if x.is_floating_point() else x
    array = hocket.fuse(copy.deepcopy(models), backend=backend, shared=True)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        own = [model(x) for model in models]
        array(x)
        out = array(x)
    for index, (model, expected) in enumerate(zip(models, own, strict=True)):
        assert out.dtype in {expected.dtype, torch.float32 if backend in ("vmap", "auto") else expected.dtype}
        scale = expected.abs().max().item()
        assert (out[index] - expected).abs().max() <= 0.05 * scale, f"model {index}"
        expected.float().square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    out.float().square().sum().backward()
    for name_, p in models[1].named_parameters():
        gradient = array._store.tensor(name_).tensor.grad
        assert gradient is not None
        assert gradient.dtype == p.grad.dtype == torch.float32, "parameters stay in single precision"


@pytest.mark.parametrize("name", NETS)
def test_under_autocast_every_model_trains(name):
    skip_without_lstm(name)
    make, given = NETS[name]
    array = hocket.fuse([model.float() for model in made(make, 3)], backend="rule", shared=True)
    optimizer = hocket.optim.Adam(array.parameters(), lr=[1e-2, 3e-3, 2e-2])
    x = given()
    x = x.float() if x.is_floating_point() else x
    y = torch.arange(len(x)) % 5
    lost = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = array(x)
        losses = array.loss(F.cross_entropy, out.float(), y)
        losses.backward()
        optimizer.step()
        lost.append(losses.detach())
    assert (lost[-1] < lost[0]).all()
