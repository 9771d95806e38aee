"""Loops of which the middle alone is planned: values that cross its borders, and Python around it that raises."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F

from loops.bookkeeping.table import parts, row
from loops.loop import Loop, train, update


@row()
def group_kept_in_a_variable() -> Loop:
    model, optimizer, data = parts()

    def step(batch):
        (group,) = list(optimizer.param_groups)
        loss = train(model, optimizer, batch)
        group["lr"] *= 0.99
        print(loss.item())

    return Loop(step, model, optimizer, data)


@row()
def dict_kept_elsewhere() -> Loop:
    model, optimizer, data = parts()
    table = {}

    def step(batch):
        info = {"size": len(batch[0])}
        table["info"] = info
        loss = train(model, optimizer, batch)
        info["loss"] = loss.item()
        print(info)

    return Loop(step, model, optimizer, data, lambda: table)


@row()
def fresh_dict() -> Loop:
    model, optimizer, data = parts()
    table = {}

    def step(batch):
        info = {"size": len(batch[0])}
        loss = train(model, optimizer, batch)
        info["loss"] = loss.item()
        table["last"] = dict(info)
        print(info)
        return info

    return Loop(step, model, optimizer, data, lambda: table)


@row()
def raises_before_the_middle() -> Loop:
    model, optimizer, data = parts()
    weights = [1.0]

    def step(batch):
        weight = random.choice(weights)
        if weight != weight:
            raise ValueError("no weight")
        loss = train(model, optimizer, (batch[0] * weight, batch[1]))
        weights.append(float("nan") if len(weights) % 7 == 6 else loss.item())
        return loss.item()

    return Loop(step, model, optimizer, data, lambda: {"weights": weights})


@row()
def another_branch_later() -> Loop:
    model, optimizer, data = parts()
    count = [0]

    def step(batch):
        x, y = batch
        if random.random() < 0.3:
            x = x.flip(0)
        if count[0] > 40:
            x = x * random.uniform(0.5, 1.5)
        loss = train(model, optimizer, (x, y))
        count[0] += 1
        print(loss.item())

    return Loop(step, model, optimizer, data, lambda: {"count": count})


@row()
def changes_what_the_middle_reads() -> Loop:
    model, optimizer, data = parts()
    settings = {"scale": 1.0, "name": "a"}

    def step(batch):
        x, y = batch
        if settings["name"] == "b":
            x = -x
        loss = train(model, optimizer, (x * settings["scale"], y))
        settings["scale"] = 0.9 * settings["scale"] + 0.1 * (loss.item() > 1.3)
        settings["name"] = "b" if loss.item() > 1.5 else "a"
        print(settings)

    return Loop(step, model, optimizer, data, lambda: settings)


@row()
def list_under_two_names() -> Loop:
    model, optimizer, data = parts()
    history = []

    def step(batch):
        both = []
        loss = train(model, optimizer, batch)
        both.append(loss.detach())
        same = both
        same.append(len(both))
        history.append(same)
        print(both)

    return Loop(step, model, optimizer, data, lambda: {"history": history})


@row()
def weight_that_ramps_up_as_a_plain_float() -> Loop:
    """A mean teacher: numpy and `float` hide how the weight is computed, so that it is another number in each step."""
    model, optimizer, data = parts()
    teacher, seen = copy.deepcopy(model), {"steps": 0}

    def ramped(step, length):
        return float(np.exp(-5.0 * (1.0 - np.clip(step, 0.0, length) / length) ** 2))

    def step(batch):
        x, y = batch
        weight = ramped(seen["steps"], 50)
        output = model(x)
        with torch.no_grad():
            target = teacher(x).softmax(1)
        loss = F.cross_entropy(output, y) + weight * F.mse_loss(output.softmax(1), target)
        update(optimizer, loss)
        for own, mean in zip(model.parameters(), teacher.parameters(), strict=True):
            mean.data.mul_(0.9).add_(own.data, alpha=0.1)
        seen["steps"] += 1
        return loss.item()

    return Loop(step, [model, teacher], optimizer, data, lambda: dict(seen))
