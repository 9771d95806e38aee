"""Whole fused models in training, optimizer and scheduler included, against B independent torch runs in float64.

Left out of the comparison, by name, is what has no influence on the loss, so that its gradient is rounding noise, which
Adam and its like turn into steps of full size: a bias right before batch norm (and the running mean that contains it),
and the bias of attention's keys (a softmax does not see a number added to all of its scores).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fusion.nets import NETS
from tests.fusion.oracle import SIZES, grad_of, made
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from optim.twins import cut, of_model

STEPS = 50
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {
        "lr": [0.05, 0.02, 0.1, 0.01, 0.03, 0.07, 0.04],
        "momentum": [0.9, 0.0, 0.5, 0.1, 0.8, 0.7, 0.3],
        "weight_decay": [0.0, 0.01, 0.1, 0.0, 0.02, 0.0, 0.05],
    },
    "Adam": {
        "lr": [1e-3, 3e-3, 1e-2, 3e-4, 2e-3, 5e-3, 1e-4],
        "betas": ([0.9, 0.8, 0.5, 0.95, 0.7, 0.9, 0.6], [0.999, 0.99, 0.9, 0.95, 0.98, 0.999, 0.97]),
        "weight_decay": [0.0, 0.01, 0.1, 0.0, 0.02, 0.0, 0.05],
    },
    "AdamW": {"lr": [1e-3, 3e-3, 1e-2, 3e-4, 2e-3, 5e-3, 1e-4], "weight_decay": [0.0, 0.1, 0.01, 0.2, 0, 0, 1]},
    "RMSprop": {"lr": [1e-3, 3e-3, 1e-2, 3e-4, 2e-3, 5e-3, 1e-4], "alpha": [0.99, 0.9, 0.5, 0.8, 0.95, 0.6, 0.7]},
    "Adagrad": {"lr": [0.01, 0.03, 0.1, 0.003, 0.02, 0.05, 0.001], "lr_decay": [0.0, 0.1, 0.01, 0.5, 1.0, 0.2, 0.3]},
    "Adadelta": {"lr": [1.0, 0.5, 2.0, 0.1, 0.0, 0.3, 1.5], "rho": [0.9, 0.5, 0.99, 0.7, 0.6, 0.8, 0.95]},
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": [5, 10, 20, 3, 7, 50, 1], "gamma": [0.5, 0.9, 0.1, 0.99, 0.8, 0.7, 0.95]},
    "MultiStepLR": {"milestones": [[3, 7], [20], [], [2, 2, 9], [5, 6], [49], [0, 4]], "gamma": 0.5},
    "ExponentialLR": {"gamma": [0.9, 0.99, 0.95, 1.0, 0.8, 0.97, 0.93]},
    "CosineAnnealingLR": {"T_max": [50, 20, 10, 7, 100, 30, 5]},
    "LambdaLR": {"lr_lambda": [lambda step, m=m: 1 / (1 + 0.1 * m * step) for m in range(7)]},
    "OneCycleLR": {
        "max_lr": [0.01, 0.02, 0.005, 0.001, 0.03, 0.004, 0.01],
        "total_steps": [60, 70, 80, 90, 51, 55, 99],
    },
    "ReduceLROnPlateau": {"patience": [0, 1, 2, 3, 0, 1, 2], "factor": [0.5, 0.1, 0.9, 0.2, 0.3, 0.7, 0.8]},
}
# Parts of tensors without influence on the loss; see above.
LEFT_OUT: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "residual": {"stem.bias": lambda t: t[:0], "norm.running_mean": lambda t: t[:0]},
    "attention": {
        f"1.layers.{n}.self_attn.in_proj_bias": lambda t: torch.cat((t[:8], t[16:])) if t.ndim else t for n in range(2)
    },
}


class Runs:
    """A fused run, and beside it B plain ones that share nothing with it."""

    def __init__(self, net: str, optimizer: str, scheduler: str, num_models: int) -> None:
        make, given = NETS[net]
        self.models = made(make, num_models)
        self.left_out = LEFT_OUT.get(net, {})
        self.array = hocket.fuse(copy.deepcopy(self.models), backend="rule", strict=True, shared=True)
        self.batches = [given() for _ in range(3)]
        classes = self.models[0](self.batches[0]).shape[-1]
        self.models = made(make, num_models)  # that call moved running statistics
        self.targets = [torch.randint(0, classes, batch.shape[:1]) for batch in self.batches]
        options = {key: cut(value, num_models) for key, value in OPTIMIZERS[optimizer].items()}
        arguments = {key: cut(value, num_models) for key, value in SCHEDULERS[scheduler].items()}
        if scheduler == "OneCycleLR":
            arguments["cycle_momentum"] = optimizer in ("SGD", "Adam", "AdamW")
        self.optimizer = getattr(hocket.optim, optimizer)(self.array.parameters(), **options)
        self.scheduler = getattr(hocket.lr_scheduler, scheduler)(self.optimizer, **arguments)
        self.single = [
            getattr(torch.optim, optimizer)(model.parameters(), **{k: of_model(v, m) for k, v in options.items()})
            for m, model in enumerate(self.models)
        ]
        self.schedulers = [
            getattr(torch.optim.lr_scheduler, scheduler)(each, **{k: of_model(v, m) for k, v in arguments.items()})
            for m, each in enumerate(self.single)
        ]

    def step(self, number: int) -> list[tuple[str, Tensor, Tensor]]:
        """One step of everything; gives what each model put out: fused, and alone."""
        x, target = self.batches[number % 3], self.targets[number % 3]
        self.optimizer.zero_grad()
        out = self.array(x)
        losses = self.array.loss(F.cross_entropy, out, target)
        losses.backward()
        self.optimizer.step()
        found = []
        lost = []
        for index, (model, optimizer) in enumerate(zip(self.models, self.single, strict=True)):
            optimizer.zero_grad()
            own = model(x)
            loss = F.cross_entropy(own, target)
            loss.backward()
            optimizer.step()
            found.append((f"output of model {index}", out[index].detach(), own.detach()))
            found.append((f"loss of model {index}", losses[index].detach(), loss.detach()))
            lost.append(loss.detach())
        if isinstance(self.scheduler, hocket.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(losses.detach())
            for each, loss in zip(self.schedulers, lost, strict=True):
                each.step(loss)
        else:
            for each in (self.scheduler, *self.schedulers):
                each.step()
        return found

    def check(self, tolerance: float, outputs: list[tuple[str, Tensor, Tensor]]) -> None:
        for what, fused, plain in outputs:
            close(fused, plain, tolerance, what)
        state = self.array.state_dict()
        unfused = self.optimizer.unfuse()
        for index, (model, optimizer) in enumerate(zip(self.models, self.single, strict=True)):
            for name, tensor in model.state_dict().items():
                self._close(name, state[f"{index}.{name}"], tensor, tolerance, f"{name} of model {index}")
            expected = optimizer.state_dict()
            for number, (name, parameter) in enumerate(model.named_parameters()):
                what = f"gradient of {name}, model {index}"
                gradient = grad_of(self.array, name, index)
                assert gradient is not None
                assert parameter.grad is not None
                self._close(name, gradient, parameter.grad, tolerance, what)
                entries = expected["state"].get(number, {})
                assert unfused[index]["state"].get(number, {}).keys() == entries.keys()
                for key, value in entries.items():
                    if not isinstance(value, Tensor):
                        assert unfused[index]["state"][number][key] == value
                        continue
                    what = f"{key} of {name}, model {index}"
                    self._close(name, unfused[index]["state"][number][key], value, tolerance, what)
            assert unfused[index]["param_groups"] == expected["param_groups"]

    def _close(self, name: str, fused: Tensor, plain: Tensor, tolerance: float, what: str) -> None:
        part = self.left_out.get(name, lambda t: t)
        if not plain.ndim:  # a step count
            assert torch.equal(fused, plain), what
            return
        close(part(fused), part(plain), tolerance, what)


def close(fused: Tensor, plain: Tensor, tolerance: float, what: str) -> None:
    """To a relative tolerance of the largest element of the plain one."""
    assert fused.shape == plain.shape, what
    if not plain.numel():
        return
    scale = plain.abs().max().item()
    error = (fused - plain).abs().max().item()
    assert error <= tolerance * scale, f"{what}: off by {error:.3e}, of {scale:.3e}"


def run(net: str, optimizer: str, scheduler: str, num_models: int) -> None:
    runs = Runs(net, optimizer, scheduler, num_models)
    before = {name: tensor.clone() for name, tensor in runs.array.state_dict().items()}
    runs.check(1e-12, runs.step(0))
    for number in range(1, STEPS):
        outputs = runs.step(number)
    runs.check(1e-9, outputs)
    after = runs.array.state_dict()
    for index, model in enumerate(runs.models):
        still = OPTIMIZERS[optimizer]["lr"][index] == 0 and scheduler != "OneCycleLR"
        for name, _ in model.named_parameters():
            if runs.left_out.get(name, lambda t: t)(before[f"{index}.{name}"]).numel():
                moved = not torch.equal(after[f"{index}.{name}"], before[f"{index}.{name}"])
                assert moved is not still, f"{name} of model {index}: {'moved at a rate of 0' if still else 'still'}"


def _pairs() -> list[tuple[str, str, str]]:
    """Every net with every optimizer, the schedulers in turn."""
    names = list(SCHEDULERS)
    pairs = [(net, optimizer) for net in NETS for optimizer in OPTIMIZERS]
    return [(*pair, names[number % len(names)]) for number, pair in enumerate(pairs)]


def _quick() -> list[Any]:
    """A third of them, of which each net and each optimizer has some."""
    marks = [number % 3 != number // len(OPTIMIZERS) % 3 for number in range(len(NETS) * len(OPTIMIZERS))]
    return [pytest.param(*each, marks=[pytest.mark.slow] * slow) for each, slow in zip(_pairs(), marks, strict=True)]


@pytest.mark.parametrize(("net", "optimizer", "scheduler"), _quick())
def test_three_models(net, optimizer, scheduler):
    run(net, optimizer, scheduler, 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_models", [size for size in SIZES if size != 3])
@pytest.mark.parametrize(("net", "optimizer", "scheduler"), _pairs())
def test_other_numbers_of_models(net, optimizer, scheduler, num_models):
    run(net, optimizer, scheduler, num_models)


@pytest.mark.slow
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_scheduler_with_every_optimizer(optimizer, scheduler, num_models):
    run("mlp", optimizer, scheduler, num_models)


def test_what_is_left_out_is_named_rightly():
    for net, parts in LEFT_OUT.items():
        model = NETS[net][0]()
        assert isinstance(model, nn.Module)
        assert parts.keys() <= model.state_dict().keys()
