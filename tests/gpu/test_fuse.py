"""Fused training on a real device: what B single runs compute there, under autocast and a scaler, too."""

import copy

import pytest
import torch
from tests.fusion.nets import NETS
from tests.fusion.oracle import made
from torch.nn import functional as F

import hocket

pytestmark = pytest.mark.gpu

RATES = [1e-3, 3e-3, 1e-2]


def pair(net: str, dtype: torch.dtype):
    make, given = NETS[net]
    models = [model.to("cuda", dtype) for model in made(make, 3)]
    x = given().cuda()
    return models, x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("net", NETS)
def test_training_is_that_of_single_models(net, backend):
    models, x = pair(net, torch.float64)
    array = hocket.fuse(copy.deepcopy(models), backend=backend, shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=RATES, momentum=0.9)
    singles = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model, lr in zip(models, RATES, strict=True)
    ]
    target = torch.arange(len(x), device="cuda") % 5
    for _ in range(5):
        optimizer.zero_grad()
        losses = array.losses(F.cross_entropy, x, target)  # "auto": whatever is faster, one model after another too
        losses.backward()
        optimizer.step()
        for index, (model, single) in enumerate(zip(models, singles, strict=True)):
            single.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            single.step()
            torch.testing.assert_close(
                losses[index].detach().as_subclass(torch.Tensor), loss.detach(), rtol=1e-9, atol=0
            )
    for fused, model in zip(array.unfuse(), models, strict=True):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("net", NETS)
def test_under_autocast_every_model_trains(net, dtype):
    models, x = pair(net, torch.float32)
    array = hocket.fuse(models, backend="rule", shared=True)
    optimizer = hocket.optim.Adam(array.parameters(), lr=RATES)
    scaler = hocket.optim.GradScaler(3, device="cuda", init_scale=256.0)
    target = torch.arange(len(x), device="cuda") % 5
    lost = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            out = array(x)
        losses = array.loss(F.cross_entropy, out.float(), target)
        scaler.scale(losses).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        lost.append(losses.detach())
    assert all(torch.isfinite(each).all() for each in lost)
    assert (lost[-1] < lost[0]).all()


def test_an_overflow_costs_only_its_own_model_a_step():
    models, x = pair("mlp", torch.float32)
    array = hocket.fuse(models, backend="rule", shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=0.1)
    scaler = hocket.optim.GradScaler(3, device="cuda", init_scale=[1024.0, 1024.0, 1024.0])
    before = [parameter.detach().clone() for parameter in array.parameters()]
    target = torch.arange(len(x), device="cuda") % 5
    losses = array.loss(F.cross_entropy, array(x), target)
    spoiled = losses * torch.tensor([1.0, float("inf"), 1.0], device="cuda")
    scaler.scale(spoiled).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale().tolist() == [1024.0, 512.0, 1024.0]
    for parameter, old in zip(array.parameters(), before, strict=True):
        assert torch.equal(parameter[1], old[1])
    assert any(not torch.equal(parameter[0], old[0]) for parameter, old in zip(array.parameters(), before, strict=True))
