"""What befalls models in training, against plain models that it befalls alone: slots, scales, clipping, autocast."""

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

RATES = [0.01, 0.03, 0.002]


def net() -> nn.Module:
    """Batch norm, so that there are buffers; no bias in front of it."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


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


class Single:
    """A plain model with an optimizer and a schedule of its own."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)

    def step(self, number: int, limit: float | None = None) -> None:
        x, y = batch(number)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.scheduler.step()


class Fused:
    """All of them at once."""

    def __init__(self, models: list[nn.Module], rates: list[float]) -> None:
        self.array = hocket.fuse(copy.deepcopy(models), backend="rule", shared=True, strict=True)
        self.optimizer = hocket.optim.Adam(self.array.parameters(), lr=rates)
        self.scheduler = hocket.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)

    def step(self, number: int, limits: list[float] | None = None) -> None:
        x, y = batch(number)
        self.optimizer.zero_grad()
        self.array.loss(F.cross_entropy, self.array(x), y).backward()
        if limits is not None:
            hocket.optim.clip_grad_norm_(self.array.parameters(), limits)
        self.optimizer.step()
        self.scheduler.step()

    def check(self, singles: list[Single]) -> None:
        for fused, state, single in zip(self.array.unfuse(), self.optimizer.unfuse(), singles, strict=True):
            for name, tensor in single.model.state_dict().items():
                torch.testing.assert_close(fused.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
            expected = single.optimizer.state_dict()
            assert state["param_groups"] == expected["param_groups"]
            for number, entries in expected["state"].items():
                for key, value in entries.items():
                    torch.testing.assert_close(state["state"][number][key], value, rtol=1e-9, atol=1e-15)


def test_models_leave_and_come_in_mid_training():
    models = made(net, 3)
    newcomer = made(net, 1)[0]
    fused = Fused(models, RATES)
    singles = [Single(model, lr) for model, lr in zip(models, RATES, strict=True)]

    def steps(numbers):
        for number in numbers:
            fused.step(number)
            for single in singles:
                single.step(number)
        fused.check(singles)

    steps(range(5))
    gone = fused.array.drop(1)
    fused.optimizer.drop(1)
    fused.scheduler.select_models([0, 2])
    for name, tensor in singles.pop(1).model.state_dict().items():
        torch.testing.assert_close(gone.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    steps(range(5, 10))
    fused.array.refill(0, newcomer)
    fused.optimizer.refill(0, lr=0.05)
    fused.scheduler.refill(0)
    singles[0] = Single(newcomer, 0.05)
    steps(range(10, 20))
    assert [model[1].num_batches_tracked.item() for model in fused.array.unfuse()] == [10, 20]


def test_each_models_gradients_are_clipped_by_its_own_norm():
    models = made(net, 3)
    limits = [0.01, 1e6, 0.2]
    fused = Fused(models, RATES)
    singles = [Single(model, lr) for model, lr in zip(models, RATES, strict=True)]
    for number in range(10):
        fused.step(number, limits)
        for single, limit in zip(singles, limits, strict=True):
            single.step(number, limit)
    fused.check(singles)


def test_an_overflow_costs_only_its_own_model_a_step():
    """As `torch.amp.GradScaler` decides for each model alone: one skips the step and halves its scale."""
    models = made(net, 3)
    fused = Fused(models, RATES)
    singles = [Single(model, lr) for model, lr in zip(models, RATES, strict=True)]
    scaler = hocket.optim.GradScaler(3, init_scale=1024.0, growth_interval=3)
    others = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(3)]
    for number in range(8):
        x, y = batch(number)
        spoilt = [torch.inf if (number, index) in {(2, 1), (3, 1), (6, 0)} else 1.0 for index in range(3)]
        fused.optimizer.zero_grad()
        losses = fused.array.loss(F.cross_entropy, fused.array(x), y)
        scaler.scale(losses * torch.tensor(spoilt, dtype=torch.float64)).sum().backward()
        scaler.step(fused.optimizer)
        scaler.update()
        for single, other, factor in zip(singles, others, spoilt, strict=True):
            single.optimizer.zero_grad()
            other.scale(F.cross_entropy(single.model(x), y) * factor).backward()
            other.step(single.optimizer)
            other.update()
        assert scaler.get_scale().tolist() == [other.get_scale() for other in others]
    assert len(set(scaler.get_scale().tolist())) == 3
    fused.check(singles)


def test_a_model_that_is_not_finite_is_frozen_and_the_others_never_know():
    models = made(net, 3)
    spoilt = copy.deepcopy(models)
    spoilt[1][0].weight.data[0, 0, 0, 0] = torch.nan
    found = []
    for each in (models, spoilt):
        fused = Fused(each, RATES)
        fused.optimizer = hocket.optim.Adam(fused.array.parameters(), lr=RATES, nonfinite="freeze")
        fused.scheduler = hocket.lr_scheduler.StepLR(fused.optimizer, step_size=2, gamma=0.7)
        for number in range(6):
            fused.step(number)
        found.append(fused.array)
        assert fused.optimizer.frozen == (False, each is spoilt, False)
    for name, parameter in spoilt[1].named_parameters():
        resting = found[1].state_dict(model=1)[name]
        assert torch.equal(resting.nan_to_num(7.0), parameter.nan_to_num(7.0)), f"{name}: a frozen model must not move"
    for index in (0, 2):
        for name, tensor in found[0].state_dict(model=index).items():
            assert torch.equal(found[1].state_dict(model=index)[name], tensor), name


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
