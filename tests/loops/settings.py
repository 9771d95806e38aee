"""Loops whose step is pure and reads plain values that the code between steps changes: weights, rates, options."""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, ordinary, task, update

temperature = 1.0


@loop(planned=True)
def temperature_in_a_global() -> Loop:
    global temperature
    temperature = 1.0
    model, optimizer, batches = task()

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]) / temperature, batch[1]))

    def after(n, _):
        global temperature
        if n % 40 == 39:
            temperature *= 0.8

    return Loop(step, model, optimizer, batches, lambda: {"temperature": temperature}, after)


@loop(planned=True)
def dropout_made_stronger() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(n, _):
        if n == CHANGE:
            model[2].p = 0.5

    return Loop(ordinary(model, optimizer), model, optimizer, labelled(), after=after)


@loop(planned=True)
def class_weights_written(model, optimizer, batches) -> Loop:
    """The same tensor with other values: nothing but its content tells."""
    weights = torch.ones(4)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1], weight=weights))

    def after(n, _):
        if n % 10 == 0:
            weights[n % 4] += 0.5

    return Loop(step, model, optimizer, batches, lambda: {"weights": weights}, after)


@loop(planned=True)
def name_of_the_activation(model, optimizer, batches) -> Loop:
    model.activation = "relu"

    def step(batch):
        hidden = getattr(F, model.activation)(model[0](batch[0]))
        return update(optimizer, F.cross_entropy(model[2](hidden), batch[1]))

    def after(n, _):
        if n == CHANGE:
            model.activation = "gelu"

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def scales_of_images_changed() -> Loop:
    """A whole number and another one, of which C++ computes sizes."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale = {"height": 1, "width": 1.0}

    def step(batch):
        x = F.interpolate(batch[0], scale_factor=(scale["height"], scale["width"]), mode="bilinear")
        return update(optimizer, F.cross_entropy(model(x), batch[1]))

    def after(n, _):
        if n in (1, 20, 40, 60):
            scale.update(height=1 + n // 20 % 2, width=1 + n / 100)

    batches = [(torch.randn(6, 1, 6, 6), torch.randint(4, (6,))) for _ in range(5)]
    return Loop(step, model, optimizer, batches, lambda: dict(scale), after)


@loop(planned=True)
def array_that_gets_another_shape(model, optimizer, batches) -> Loop:
    """Its content stays, and so does the array. The gradients are emptied as torch once did it."""
    weights = np.arange(4, dtype=np.float32)

    def step(batch):
        scale = 1.0 if weights.ndim == 1 else 0.5
        return update(optimizer, scale * F.cross_entropy(model(batch[0]), batch[1], torch.from_numpy(weights).view(-1)))

    def after(n, _):
        for parameter in model.parameters():
            parameter.grad.detach_().zero_()
        if n == CHANGE:
            weights.shape = (2, 2)

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def switch_of_torchs_python() -> Loop:
    """The fast path of attention rounds otherwise."""
    switch = torch.backends.mha.set_fastpath_enabled
    model = nn.ModuleDict({"own": nn.Linear(8, 8), "of": nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)})
    optimizer = torch.optim.SGD(model["own"].parameters(), lr=0.05)
    model["of"].eval()

    def step(batch):
        with torch.no_grad():
            found = model["of"](batch[None])
        return update(optimizer, (model["own"](batch) * found).square().mean())

    def after(n, _):
        if n == CHANGE:
            switch(False)

    switch(True)
    return Loop(step, model, optimizer, torch.randn(5, 6, 8), after=after, close=lambda: switch(True))


@loop(word="not dense")
def padding_as_nested_tensors() -> Loop:
    """A teacher in evaluation makes a nested tensor of its mask."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    model = nn.ModuleDict({"own": nn.Linear(8, 8), "of": nn.TransformerEncoder(layer, 1)})
    optimizer = torch.optim.SGD(model["own"].parameters(), lr=0.05)
    model["of"].eval()
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with warnings.catch_warnings(action="ignore"):  # once in a process, that nested tensors are a prototype
        torch.nested.nested_tensor([torch.zeros(1)])

    def step(batch):
        with torch.no_grad():
            found = model["of"](batch, src_key_padding_mask=padding)
        return update(optimizer, (model["own"](batch) * found).square().mean())

    return Loop(step, model, optimizer, torch.randn(5, 2, 3, 8))
