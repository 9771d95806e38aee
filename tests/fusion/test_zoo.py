"""The zoo's models fuse as they are: outputs, gradients and buffers of a step, in small sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.fusion.oracle import check_step
from torch import nn

import hocket
from hocket import zoo

# Zoo entries: options, and the number of the model in the job.
MODELS: dict[str, tuple[str, dict[str, int], int]] = {
    # Few enough points that no maximum over them is above zero in all examples: the shift in front of it would vanish.
    "pointnet-cls": ("pointnet-cls", {"points": 4, "width": 4, "batch_size": 8}, 0),
    "pointnet-seg": ("pointnet-seg", {"points": 4, "width": 4, "batch_size": 8}, 0),
    "dcgan generator": ("dcgan", {"image_size": 16, "width": 4}, 0),
    "dcgan discriminator": ("dcgan", {"image_size": 16, "width": 4}, 1),
    "resnet18": ("resnet18", {"image_size": 64}, 0),
    "mobilenet-v2": ("mobilenet-v2", {"image_size": 64}, 0),
    "mobilenet-v3-large": ("mobilenet-v3-large", {"image_size": 64}, 0),
    "transformer": ("transformer", {"width": 16, "depth": 2, "steps": 6, "vocab": 20}, 0),
    "bert-medium": ("bert-medium", {"width": 64, "depth": 8, "steps": 6, "vocab": 20}, 0),
}
# Behind the one there is a maximum, a linear layer, and then a batch norm, which takes a shift out again; behind the
# other a dropout and a batch norm.
VANISHING = {
    "pointnet-cls": frozenset({"features.last.1.bias", "last.0.bias"}),
    "pointnet-seg": frozenset({"features.last.1.bias"}),
}


def load(name: str, seed: int) -> tuple[nn.Module, Any]:
    """A model in float64 without dropout, and its input."""
    entry, options, which = MODELS[name]
    job = zoo.load(entry, seed=seed, num_batches=1, **({"batch_size": 4} | options))
    model = job.models[which].double().train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.self_attn.dropout = 0.0
        if hasattr(layer, "dropout_prob"):
            layer.dropout_prob = 0.0
    batch = job.batch(0)
    if name == "dcgan generator":
        return model, {"args": (torch.randn(4, 100, 1, 1, dtype=torch.float64),)}
    if isinstance(batch, dict):
        return model, {"kwargs": batch}
    inputs = batch[0] if isinstance(batch, tuple) else batch
    return model, {"args": (inputs.double() if inputs.is_floating_point() else inputs,)}


def called(model: Any, given: dict[str, Any]) -> torch.Tensor:
    out = model(*given.get("args", ()), **given.get("kwargs", {}))
    return out if isinstance(out, torch.Tensor) else out.loss


@pytest.mark.parametrize(
    "num_models", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
# Quick networks of images, which are smaller, are in test_strangers.py.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith(("mobilenet", "resnet"))) for n in MODELS]
)
def test_fuses_unchanged(name, num_models):
    if name == "bert-medium":
        pytest.importorskip("transformers")
    if name.startswith(("resnet", "mobilenet")):
        pytest.importorskip("pytorchcv")
    torch.manual_seed(0)
    models = [load(name, seed)[0] for seed in range(num_models)]
    given = load(name, 0)[1]
    array = hocket.fuse(copy.deepcopy(models), backend="rule", strict=True, shared=True)
    check_step(array, models, lambda model: called(model, given), VANISHING.get(name, frozenset()))
    head = array.report().splitlines()[0]
    assert head.startswith(f"{num_models} model"), head
    assert "loop" not in head
    assert "vmap" not in head
