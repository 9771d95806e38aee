"""Loops whose step is pure and reads plain values that the code between steps changes: weights, rates, options."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, ordinary, task, update

temperature = 1.0


class Coder(nn.Module):
    """A variational autoencoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)
        self.weight_of_kl = 0.0

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return F.mse_loss(self.decode(z), x), kl


def coder():
    model = Coder()
    return model, torch.optim.Adam(model.parameters(), lr=0.01), [torch.randn(6, 8) for _ in range(10)]


@loop(planned=True)
def kl_weight_in_an_attribute_of_the_model() -> Loop:
    model, optimizer, batches = coder()

    def step(x):
        error, kl = model(x)
        return update(optimizer, error + model.weight_of_kl * kl)

    def after(n, _):
        model.weight_of_kl = min(1.0, n / CHANGE)

    return Loop(step, model, optimizer, batches, lambda: {"weight": model.weight_of_kl}, after)


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
def rate_set_by_hand(model, optimizer, batches) -> Loop:
    """Warm-up and decay outside the step, the way that needs no scheduler."""

    def after(n, _):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (n + 1) / 20) * 0.99**n

    return Loop(ordinary(model, optimizer), model, optimizer, batches, after=after)


@loop(planned=True)
def rate_by_the_loss(model, optimizer, batches) -> Loop:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)

    def after(n, loss):
        scheduler.step(loss.item())

    return Loop(ordinary(model, optimizer), model, optimizer, batches, lambda: {"bad": scheduler.num_bad_epochs}, after)


@loop(planned=True)
def dropout_made_stronger() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(n, _):
        if n == CHANGE:
            model[2].p = 0.5

    return Loop(ordinary(model, optimizer), model, optimizer, labelled(), after=after)


@loop(planned=True)
def label_smoothing_changed(model, optimizer, batches) -> Loop:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)

    def step(batch):
        return update(optimizer, criterion(model(batch[0]), batch[1]))

    def after(n, _):
        if n == CHANGE:
            criterion.label_smoothing = 0.0

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def loss_replaced(model, optimizer, batches) -> Loop:
    criterion = F.cross_entropy

    def step(batch):
        return update(optimizer, criterion(model(batch[0]), batch[1]))

    def after(n, _):
        nonlocal criterion
        if n == CHANGE:
            criterion = functools.partial(F.multi_margin_loss, margin=0.5)

    return Loop(step, model, optimizer, batches, after=after)


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
