"""Models under autocast, against plain models under autocast."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.fusion.nets import NETS, VANISHING
from tests.fusion.oracle import made
from torch import nn

import hocket


def skip_without_lstm() -> None:
    """Torch has no LSTM in bfloat16 on a processor without AVX-512."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError as error:
            if "primitive descriptor" not in str(error):
                raise
            pytest.skip("torch has no LSTM in bfloat16 on a CPU without AVX-512")


@pytest.mark.parametrize("backend", ["rule", "vmap", "loop", "auto"])
@pytest.mark.parametrize("name", NETS)
def test_under_autocast_outputs_are_those_of_single_models_under_autocast(name, backend):
    """On the CPU to bfloat16: the same types, and the same numbers to bfloat16's rounding.

    torch's vmap (2.13) adds a linear layer's bias in single precision: there the result has more digits than alone.
    """
    if name == "words":
        skip_without_lstm()
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
    for path, p in models[1].named_parameters():
        gradient = array._store.tensor(path).tensor.grad
        assert gradient.dtype == p.grad.dtype == torch.float32, "parameters stay in single precision"
        if path not in VANISHING.get(name, ()):
            assert (gradient[1] - p.grad).abs().max() <= 0.1 * p.grad.abs().max(), path
